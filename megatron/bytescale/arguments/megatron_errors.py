"""Messages of Megatron, and our lines about them, which name flags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Reason:
    """One reason of Megatron, and our line about it.

    Attributes:
        pattern: regular expression of Megatron's message.
        line: our line, with the groups of the pattern and the names that ``known_line`` is given. A group ``flag``
            holds an argument.
    """

    pattern: str
    line: str


REASONS: Final = (
    Reason(r"this must hold: not --(?:bf16|fp16)$", "--bf16 and --fp16 exclude each other: give one"),
    Reason(
        r"Number of decoder layers (?P<found>\d+) ?must match num_layers (?P<layers>\d+)",
        "--pipeline-model-parallel-layout has {found} decoder layers (t), and --num-layers is {layers}",
    ),
    Reason(
        r"Invalid layer character: (?P<letter>.) .*known layer characters: (?P<known>.*)$",
        "--pipeline-model-parallel-layout has the unknown layer {letter!r}; known are {known}",
    ),
    Reason(
        r"When interleaved schedule is used and p2p communication overlap is disabled",
        "virtual stages without --overlap-p2p-communication need --pipeline-model-parallel-size 3 or more",
    ),
    Reason(
        r"When interleaved schedule is used, pipeline-model-parallel size",
        "virtual stages need --pipeline-model-parallel-size 2 or more",
    ),
    Reason(
        r"No module named '(?P<name>\w+)",
        "the package {name} is not installed: install it, or remove the flag that needs it",
    ),
    Reason(
        r"--ckpt-format torch_dcp is only tested", "--ckpt-format torch_dcp needs FSDP: use --ckpt-format torch_dist"
    ),
    Reason(
        r"residual connection in fp32 only supported",
        "--fp32-residual-connection needs --bf16 or --fp16",
    ),
    Reason(
        r"can distribute recomputed activations only across",
        "--distribute-saved-activations needs --tensor-model-parallel-size 2 or more",
    ),
    Reason(
        r"distributed recompute activations is only application",
        "--distribute-saved-activations needs --recompute-granularity full",
    ),
    Reason(
        r"for distributed recompute activations to work you need",
        "--distribute-saved-activations needs --recompute-method uniform or block",
    ),
    Reason(
        r"recompute method is not yet supported for selective",
        "--recompute-granularity selective takes no --recompute-method: remove it",
    ),
    Reason(
        r"Tensor parallel communication/GEMM overlap can happen only",
        "--tp-comm-overlap needs --sequence-parallel",
    ),
    Reason(
        r"Group query attention is mutually exclusive with multi latent attention",
        "--group-query-attention and --multi-latent-attention exclude each other: give one",
    ),
    Reason(
        r"CUDA_DEVICE_MAX_CONNECTIONS to 1",
        "--tensor-model-parallel-size > 1 needs the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
)
"""Messages about arguments that have a line of ours."""


def known_line(reasons: Iterable[Reason], text: str, **names: object) -> str | None:
    """Return our line about a message of Megatron, with the values of names in it; None for an unknown message."""
    for reason in reasons:
        if found := re.search(reason.pattern, text):
            groups = {name: _dashed(value) if name == "flag" else value for name, value in found.groupdict().items()}
            return reason.line.format(**names, **groups)
    return None


def in_flags(text: str) -> str:
    """Return a message of Megatron in one line: our line about it, or its own words with flags for arguments."""
    text = text.replace("this must hold: assert ", "this must hold: ")
    text = re.sub(r"\bargs\.(\w+)", lambda found: f"--{_dashed(found[1])}", " ".join(text.split()))
    return known_line(REASONS, text) or text


def _dashed(argument: str) -> str:
    return argument.replace("_", "-")
