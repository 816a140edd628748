"""Adam's states and float32 parameters in pages of host memory and of a local disk (Angel-PTM, Nie et al. 2023)."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.config.memory.states import NvmeConfig, ResidentStates, StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.pages import page_bytes_of
from bytescale_ext.plan.states.tiers import BLOCK_BYTES
from bytescale_ext.states.disks import check_disk, free_disk_bytes
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.activations.flags import local_processes
from megatron.bytescale.features.feature import COST_FLAG, Feature
from megatron.bytescale.features.tables.flags import free_bytes_of_process

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

POLICIES: Final = ("resident", "paged", "auto")
STAGES: Final = (1, 2, 3)
UPDATES: Final = ("exact", "lock-free")
HOST_GRADIENTS: Final = 2
"""The first stage in which gradients leave the device."""

WINDOW_LAYERS: Final = 2


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
        "equal those of a resident run. auto: the fastest by prediction of resident states, all stages and, with "
        "--state-nvme, shares of the pages on the disk, with what the activation policy then does, where both fit in "
        "--device-memory-gb and --host-memory-gb together. Default: resident. `bytescale states` predicts the effect.",
    )
    group.add_argument(
        "--state-stage",
        type=int,
        choices=STAGES,
        help="With paged states, what leaves the device. 1: Adam's states. 2: gradients too, which are summed in host "
        "memory as the backward pass computes them; the device then holds 2 bytes a parameter in bf16. 3: parameters "
        "too; those of --state-window-layers layers are on the device at a time (1).",
    )
    group.add_argument(
        "--state-window-layers",
        type=int,
        metavar="N",
        help=f"With --state-stage 3, how many layers have their parameters on the device at a time: the one that "
        f"computes, and the next ones, which are copied meanwhile ({WINDOW_LAYERS}).",
    )
    _add_update_arguments(group)
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
    group.add_argument(
        "--state-nvme",
        type=Path,
        metavar="DIR",
        help="A folder of a local disk for the pages that --state-host-gb has no room for. They are read ahead of the "
        "update and written behind it, with checksums, in two versions. Its files are scratch: a run goes on from "
        "Megatron's checkpoint. If the disk fails in a run, the step ends in host memory, is saved and the run ends; "
        "therefore this turns --exit-signal-handler on.",
    )
    group.add_argument(
        "--state-nvme-gb",
        type=float,
        metavar="G",
        help="The most space of --state-nvme for each process. Default: what is free.",
    )


def _add_update_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--state-update",
        choices=UPDATES,
        default="exact",
        help="With paged states, when Adam runs. exact: in the step, which waits for it. lock-free: on a thread beside "
        "the next steps, which compute with the parameters that are there; when these change is decided by counting "
        "steps, so all ranks agree and runs can be repeated. Before a save or an evaluation all updates are waited "
        "for. Changes the results of training; gradients and results take 6 more bytes of host memory a parameter in "
        "bf16, 10 beside more than one step. Default: exact.",
    )
    group.add_argument(
        "--state-update-steps",
        type=int,
        metavar="N",
        help="With --state-update lock-free, beside how many steps an update runs (1). The next one takes the mean of "
        "their gradients, so parameters lack the gradients of at most the last 2N-1 steps.",
    )


def before_checks(args: Any) -> None:
    """Let a run whose disk fails save and end as on a signal. Raises ValueError for what cannot be chosen."""
    if args.state_policy == "auto":
        from megatron.bytescale.features.states.state_choice import check_auto

        check_auto(args)
    if args.state_nvme is not None:
        args.exit_signal_handler = True


def resolve(args: Any, run: RunConfig) -> StateConfig | ResidentStates:
    """Return the size of pages and their budgets, which are enough for the fullest stage, or what was chosen.

    Raises ValueError for a size that is no page, a folder that is no local disk, and where the pages do not fit.
    """
    page_bytes = page_bytes_of(args.state_page_mb, "--state-page-mb")
    for name in ("state_host_gb", "state_nvme_gb"):
        given = getattr(args, name)
        if given is not None and not 0 < given < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {given:g} is not an amount of memory")
    if args.state_policy == "auto":
        from megatron.bytescale.features.states.state_choice import chosen_states

        return chosen_states(args, run)
    host_bytes = min(free_bytes_of_process(args), _bytes(args.state_host_gb))
    nvme, window = resolve_nvme(args, run, page_bytes), resolve_window(args)
    stage, late = args.state_stage or 1, resolve_update_steps(args)
    config = StateConfig(page_bytes, host_bytes, nvme, stage, window, late)
    for case in cases(args, run, page_bytes):
        if config.nvme is None or case.host_bytes <= config.host_bytes:
            config.check_fits(case.host_bytes)
        else:
            config.check_fits(case.least_host_bytes, case.file_bytes)
    return config


def resolve_window(args: Any) -> int:
    """Return the number of layers of the window. Raises ValueError for none, and where there is no window."""
    if args.state_window_layers is None:
        return WINDOW_LAYERS
    if (args.state_stage or 1) < 3:
        raise ValueError("--state-window-layers needs --state-stage 3")
    if args.state_window_layers < 1:
        raise ValueError(f"--state-window-layers {args.state_window_layers} must be at least 1")
    return int(args.state_window_layers)


def resolve_update_steps(args: Any) -> int:
    """Return beside how many steps an update runs, 0 for exact updates. Raises ValueError for none."""
    if args.state_update == "exact":
        if args.state_update_steps is not None:
            raise ValueError("--state-update-steps needs --state-update lock-free")
        return 0
    steps = 1 if args.state_update_steps is None else int(args.state_update_steps)
    if steps < 1:
        raise ValueError(f"--state-update-steps {steps} must be at least 1")
    return steps


def resolve_nvme(args: Any, run: RunConfig, page_bytes: int) -> NvmeConfig | None:
    """Return the disk and its budget. Raises ValueError for a folder or pages that do not suit."""
    if args.state_nvme is None:
        if args.state_nvme_gb is not None:
            raise ValueError("--state-nvme-gb needs --state-nvme")
        return None
    if page_bytes % BLOCK_BYTES:
        raise ValueError(f"--state-page-mb {args.state_page_mb:g} must be a multiple of 1/256 with --state-nvme")
    if args.fake_process_group:  # a dry run is of another machine
        return NvmeConfig(args.state_nvme, _bytes(args.state_nvme_gb), run.process.rank, args.exit_signal)
    check_disk(args.state_nvme, run.process.rank, "--state-nvme")
    free = free_disk_bytes(args.state_nvme) / local_processes()
    num_bytes = min(free, _bytes(args.state_nvme_gb))
    return NvmeConfig(args.state_nvme, num_bytes, run.process.rank, args.exit_signal)


def _bytes(gigabytes: float | None) -> float:
    """Return a budget in bytes; without limit where none is given."""
    return math.inf if gigabytes is None else gigabytes * 1e9


def cases(args: Any, run: RunConfig, page_bytes: int, config: StateConfig | None = None) -> list[StateCase]:
    """Return the states of each stage. Tied embeddings of a single stage are one matrix.

    ``config``: what was resolved; None: what leaves the device is as flags say.
    """
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
            stage=config.stage if config else args.state_stage or 1,
            window_layers=config.window_layers if config else resolve_window(args),
            update_steps=resolve_update_steps(args),
        )
        for stage, layers in enumerate(run.stage_layers)
    ]


def build(training: Training, runtime: Runtime) -> Training:
    """Say what is paged; Megatron's optimizer is built later, by ``core/optimizer/optimizer.py``."""
    from megatron.training.utils import print_rank_0

    from megatron.bytescale.core.distributed.host_build import add_hooks
    from megatron.bytescale.features.states.late_updates import tell_staleness

    config = runtime.run.find(StateConfig)
    if config is None:
        print_rank_0(runtime.run.get(ResidentStates).note)
        return training
    if config.note:
        print_rank_0(config.note)
    what = ("", "; gradients in host memory", "; gradients and parameters in host memory")[config.stage - 1]
    window = f", {config.window_layers} layers on the device at a time" if config.stage == 3 else ""
    late = f", updates beside {config.update_steps} step(s)" if config.update_steps else ""
    print_rank_0(
        f"> bytescale: Adam's states in pages of {config.page_bytes:,} bytes of host memory{what}{window}{late}"
    )
    add_hooks(training.model, config, runtime.run)
    return tell_staleness(training, runtime) if config.update_steps else training


def borrowed_flags(args: Any) -> tuple[str, ...]:
    """Return the flags of activations, and the cost file, with which states are chosen."""
    of_choice = ("--host-memory-gb", "--device-memory-gb", "--link-gb-per-second", "--gpus-per-link", COST_FLAG)
    return of_choice if args.state_policy == "auto" else ()


def has_fused_norms() -> bool:
    """Return whether Megatron takes norms of gradients by kernels of another package than torch."""
    return any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))


def leaves_device(flag: str, stage: int = HOST_GRADIENTS) -> Callable[[Any], bool]:
    """Return whether a flag is set that does not work from this ``--state-stage`` on, of the arguments."""
    name = flag[2:].replace("-", "_")
    return lambda args: (args.state_stage or 1) >= stage and bool(getattr(args, name))


_REDUCED_LATER = "remove it, or use --state-stage 1: gradients are reduced from host memory after the backward pass"
_ON_DEVICE = {
    "--overlap-grad-reduce": _REDUCED_LATER,
    "--overlap-param-gather": _REDUCED_LATER,
    "--seq1f1b-zero-bubble": "remove it, or use --state-stage 1: it adds weight gradients on the device",
    "--moe-expert-slots": "remove it, or use --state-stage 1: it moves gradients on the device",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "remove it: gradients are summed in float32 already",
}
ON_DEVICE = tuple(_ON_DEVICE)
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
    refuse("--async-save", "states", "remove it, or --state-nvme: pages change while a save runs beside training",
           lambda args: args.state_nvme is not None and args.async_save),
    *(refuse(f"{flag} with host gradients", "states", why, leaves_device(flag)) for flag, why in _ON_DEVICE.items()),
    refuse("--log-params-norm", "states", "remove it: it reads the float32 parameters on the device"),
    refuse("TransformerEngine or Apex from --state-stage 2 on", "states",
           "use --state-stage 1, or uninstall it: its kernels of norms read the device alone",
           lambda args: (args.state_stage or 1) >= HOST_GRADIENTS and has_fused_norms()),
)  # fmt: skip

STATES = Feature(
    name="states",
    flag="--state-policy",
    summary="Adam's states in pages of host memory",
    add_arguments=add_arguments,
    is_on=lambda args: args.state_policy != "resident",
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    needs="--state-policy paged",
    borrows=borrowed_flags,
    refusals=REFUSALS,
)
