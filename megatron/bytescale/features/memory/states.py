"""Adam's states and float32 parameters in pages of host memory (Angel-PTM, Nie et al. 2023)."""

from __future__ import annotations

import argparse
import importlib.util
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.measure.host_memory import free_host_bytes
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.pages import page_bytes_of
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.memory.activations import local_processes

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.build import Training

POLICIES: Final = ("resident", "paged")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model states."""
    group = parser.add_argument_group("bytescale: model states")
    group.add_argument(
        "--state-policy",
        choices=POLICIES,
        default="resident",
        help="Where Adam's moments and float32 copies of parameters are. resident: where Megatron keeps them, on the "
        "device. paged: in pages of host memory, pinned for a GPU; the processor takes Adam's step, page by page, "
        "while gradients of the next page are copied to it and results of the last one from it. The device then holds "
        "parameters and gradients alone: 6 bytes a parameter instead of 18 in bf16. Losses, parameters and checkpoints "
        "equal those of a resident run. Default: resident. `bytescale states` predicts the effect.",
    )
    group.add_argument(
        "--state-host-gb",
        type=float,
        metavar="G",
        help="The most host memory of each process for pages. Default: what is free, beside --host-memory-gb.",
    )
    group.add_argument(
        "--state-page-mb",
        type=float,
        default=4.0,
        metavar="M",
        help="Size of a page in MiB, of float32 values: what is copied and updated at a time (4).",
    )


def resolve(args: Any, run: RunConfig) -> StateConfig:
    """Return the size of pages and their budget, which is enough for the fullest stage.

    Raises ValueError for a size that is no page, and where the pages do not fit in host memory.
    """
    page_bytes = page_bytes_of(args.state_page_mb, "--state-page-mb")
    if args.state_host_gb is not None and not 0 < args.state_host_gb < math.inf:
        raise ValueError(f"--state-host-gb {args.state_host_gb:g} is not an amount of memory")
    free = max(0.0, free_host_bytes() / local_processes() - (args.host_memory_gb or 0.0) * 1e9)
    given = math.inf if args.state_host_gb is None else args.state_host_gb * 1e9
    config = StateConfig(page_bytes, min(free, given))
    config.check_fits(max(case.host_bytes for case in cases(args, run, page_bytes)))
    return config


def cases(args: Any, run: RunConfig, page_bytes: int) -> list[StateCase]:
    """Return the states of each stage. Tied embeddings of a single stage are one matrix."""
    last = len(run.stage_layers) - 1
    is_one_matrix = last == 0 and not args.untie_embeddings_and_output_weights
    sharing = args.data_parallel_size * args.context_parallel_size if args.use_distributed_optimizer else 1
    return [
        StateCase(
            shape=replace(run.shape, num_layers=layers),
            tensor_parallel=run.process.tensor_parallel,
            has_embedding=stage == 0 and not is_one_matrix,
            has_head=stage == last,
            element_bytes=args.params_dtype.itemsize,
            optimizer_ranks=sharing,
            page_bytes=page_bytes,
        )
        for stage, layers in enumerate(run.stage_layers)
    ]


def build(training: Training, runtime: Runtime) -> Training:
    """Say what is paged; Megatron's optimizer is built later, by ``core/optimizer/optimizer.py``."""
    from megatron.training.utils import print_rank_0

    page_bytes = runtime.run.get(StateConfig).page_bytes
    print_rank_0(f"> bytescale: Adam's states in pages of {page_bytes:,} bytes of host memory")
    return training


def has_fused_adam(args: Any) -> bool:
    """Return whether Megatron takes Adam from another package than torch."""
    return any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))


_COPIED = "remove it: results are copied to parameters as they are"
REFUSALS = (
    refuse("--optimizer", "states", "use adam", lambda args: args.optimizer != "adam"),
    refuse("--optimizer-cpu-offload", "states", "remove it: it moves the same states"),
    refuse("--use-precision-aware-optimizer", "states", "remove it: states in pages are float32"),
    refuse("--optimizer-cuda-graph", "states", "remove it: the processor takes the step"),
    *(refuse(flag, "states", "use --use-distributed-optimizer") for flag in (
        "--use-megatron-fsdp", "--use-torch-fsdp2")),
    refuse("--fp16", "states", "use --bf16: with a loss scale steps may be skipped"),
    *(refuse(flag, "states", _COPIED) for flag in (
        "--fp8-param-gather", "--fp4-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag")),
    refuse("--log-params-norm", "states", "remove it: it reads the float32 parameters on the device"),
    refuse("the Adam of TransformerEngine or Apex", "states",
           "Megatron takes it where it is installed; uninstall it, or train without {}", has_fused_adam),
)  # fmt: skip

STATES = Feature(
    name="states",
    flag="--state-policy",
    summary="Adam's states in pages of host memory",
    add_arguments=add_arguments,
    is_on=lambda args: args.state_policy == "paged",
    resolve=resolve,
    build=build,
    needs="--state-policy paged",
    refusals=REFUSALS,
)
