"""Messages of Megatron about arguments, with the names of flags."""

from __future__ import annotations

import re
from typing import Final

REASONS: Final = (
    (r"this must hold: not --(?:bf16|fp16)$", "--bf16 and --fp16 exclude each other: give one"),
    (
        r"Number of decoder layers (?P<found>\d+) ?must match num_layers (?P<layers>\d+)",
        "--pipeline-model-parallel-layout has {found} decoder layers (t), and --num-layers is {layers}",
    ),
    (
        r"Invalid layer character: (?P<letter>.) .*known layer characters: (?P<known>.*)$",
        "--pipeline-model-parallel-layout has the unknown layer {letter!r}; known are {known}",
    ),
    (
        r"When interleaved schedule is used and p2p communication overlap is disabled",
        "virtual stages without --overlap-p2p-communication need --pipeline-model-parallel-size 3 or more",
    ),
    (
        r"When interleaved schedule is used, pipeline-model-parallel size",
        "virtual stages need --pipeline-model-parallel-size 2 or more",
    ),
    (
        r"No module named '(?P<name>\w+)",
        "the package {name} is not installed: install it, or remove the flag that needs it",
    ),
    (r"--ckpt-format torch_dcp is only tested", "--ckpt-format torch_dcp needs FSDP: use --ckpt-format torch_dist"),
    (
        r"residual connection in fp32 only supported",
        "--fp32-residual-connection needs --bf16 or --fp16",
    ),
    (
        r"can distribute recomputed activations only across",
        "--distribute-saved-activations needs --tensor-model-parallel-size 2 or more",
    ),
    (
        r"distributed recompute activations is only application",
        "--distribute-saved-activations needs --recompute-granularity full",
    ),
    (
        r"for distributed recompute activations to work you need",
        "--distribute-saved-activations needs --recompute-method uniform or block",
    ),
    (
        r"recompute method is not yet supported for selective",
        "--recompute-granularity selective takes no --recompute-method: remove it",
    ),
    (
        r"Tensor parallel communication/GEMM overlap can happen only",
        "--tp-comm-overlap needs --sequence-parallel",
    ),
    (
        r"Group query attention is mutually exclusive with multi latent attention",
        "--group-query-attention and --multi-latent-attention exclude each other: give one",
    ),
    (
        r"CUDA_DEVICE_MAX_CONNECTIONS to 1",
        "--tensor-model-parallel-size > 1 needs the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
)
"""Pattern of a message of Megatron, and our line. Others keep their message, in which arguments become flags."""


def in_flags(text: str) -> str:
    """Return a message of Megatron in one line: our line about it, or its own words with flags for arguments."""
    text = text.replace("this must hold: assert ", "this must hold: ")
    text = re.sub(r"\bargs\.(\w+)", lambda found: f"--{found[1].replace('_', '-')}", " ".join(text.split()))
    for pattern, line in REASONS:
        if found := re.search(pattern, text):
            return line.format(**found.groupdict())
    return text
