"""Adam states and float32 parameters in pages of host memory and local disk (Angel-PTM, Nie et al. 2023)."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from bytescale_ext.config.memory.states import NvmeConfig, ResidentStates, StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.measure.host_memory import local_processes
from bytescale_ext.plan.setup.choose import Decision
from bytescale_ext.plan.setup.memory import state_cases
from bytescale_ext.plan.setup.setup import AUTO
from bytescale_ext.plan.states.pages import FLOAT_BYTES, page_bytes_of
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.states.tiers import BLOCK_BYTES
from bytescale_ext.states.disks import check_disk, free_disk_bytes
from megatron.bytescale.arguments.conditions import above, chosen, equals, given
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import COST_FLAG, Feature
from megatron.bytescale.features.tables.flags import HostMemory, free_bytes_of_process

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

POLICIES: Final = ("resident", "paged", "auto")
STAGES: Final = (1, 2, 3)
HOST_GRADIENTS: Final = 2
"""First stage that keeps gradients in host memory."""

WINDOW_LAYERS: Final = 2
SPARE_SHARE: Final = 0.02
SPARE_PAGES: Final = 16
"""Allowance for pages beyond the forecast, which ignores biases and the partly filled last pages of groups."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model states."""
    group = parser.add_argument_group("bytescale: model states")
    group.add_argument(
        "--state-policy",
        choices=POLICIES,
        default="resident",
        help="Location of Adam's moments and float32 copies of parameters. resident: on the device, as Megatron "
        "keeps them. paged: in pages of host memory, pinned for a GPU. The processor updates page by page, while the "
        "next page's gradients are copied from the device and the previous page's results are copied to it. The device "
        "then holds only parameters and gradients: 6 bytes per parameter instead of 18 in bf16. Losses, parameters and "
        "checkpoints are the same as with resident states. auto: the fastest predicted choice that, together with "
        "activations, fits in --device-memory-gb and --host-memory-gb; the choices are resident states, all stages "
        "and, with --state-nvme, shares of the pages on disk. Default: resident. `bytescale states` predicts effects.",
    )
    group.add_argument(
        "--state-stage",
        type=int,
        choices=STAGES,
        help="States that leave the device with paged states. 1: Adam's states. 2: gradients too, which are summed in "
        "host memory as the backward pass computes them; the device then holds 2 bytes per parameter in bf16. 3: "
        "parameters too; only --state-window-layers layers have theirs on the device at a time. With "
        "--use-distributed-optimizer the processes of a node share gradients and parameters in host memory. "
        "Default: 1.",
    )
    group.add_argument(
        "--state-window-layers",
        type=int,
        metavar="N",
        help=f"With --state-stage 3, the number of layers whose parameters are on the device at a time: the running "
        f"layer and the next layers, which are copied meanwhile ({WINDOW_LAYERS}).",
    )
    group.add_argument(
        "--state-update-steps",
        type=int,
        default=0,
        metavar="N",
        help="With paged states, the number of steps that an Adam update overlaps with. 0 (default): none; each step "
        "waits for its update. N: a thread runs lock-free updates. The next N steps compute with the parameters of the "
        "last update, and the next update uses the mean of their gradients, so parameters lack the gradients of at "
        "most the last 2N-1 steps. New parameters arrive at a fixed step, so all ranks agree and runs can be repeated. "
        "Saves and evaluations wait for all updates. N above 0 changes the results of training, and needs 6 more bytes "
        "of host memory per bf16 parameter (10 if N > 1).",
    )
    _add_page_arguments(group)


def _add_page_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--state-host-gb",
        type=float,
        metavar="G",
        help="Maximum host memory of each process for pages. Default: free host memory minus --host-memory-gb.",
    )
    group.add_argument(
        "--state-page-mb",
        type=float,
        default=4.0,
        metavar="M",
        help="Size of a page in MiB of float32 values, the unit that is copied and updated at a time (4).",
    )
    group.add_argument(
        "--state-nvme",
        type=Path,
        metavar="DIR",
        help="Folder on a local disk for pages that do not fit in --state-host-gb. Pages are prefetched before the "
        "update and written asynchronously after it, with checksums, in two versions. The files are scratch: a run "
        "resumes from Megatron's checkpoint. If the disk fails during a run, the step finishes in host memory and is "
        "saved, and the run ends; therefore this flag turns on --exit-signal-handler.",
    )
    group.add_argument(
        "--state-nvme-gb",
        type=float,
        metavar="G",
        help="Maximum space on --state-nvme for each process. Default: the free space.",
    )


@dataclass(frozen=True, kw_only=True)
class StateFlags(HostMemory):
    """Flags of model states, and the flags that they depend on; None: not given.

    ``add_arguments`` describes the flags with the prefix ``state_``.
    """

    state_policy: str
    state_stage: int | None
    state_window_layers: int | None
    state_host_gb: float | None
    state_page_mb: float
    state_nvme: Path | None
    state_nvme_gb: float | None
    state_update_steps: int
    device_memory_gb: float | None
    num_experts: int | None
    ngram_layers: tuple[int, ...] | None
    host_tables: Sequence[str]
    seq1f1b_slices: int | str | None
    hybrid_data_parallel: bool
    activation_policy: str
    swap_fraction: float | None
    exit_signal: int = signal.SIGTERM


def before_checks(flags: StateFlags) -> Overrides:
    """Let a run save and stop as on a signal if its disk fails. Raises ValueError for a choice that is not possible."""
    if flags.state_policy == AUTO:
        _check_auto(flags)
    return NO_OVERRIDES if flags.state_nvme is None else {"exit_signal_handler": True}


def _check_auto(flags: StateFlags) -> None:
    """Raise ValueError for flags that the automatic choice lacks, sets itself, or cannot take into account."""
    auto = "--state-policy auto"
    for flag, budget in (("--device-memory-gb", flags.device_memory_gb), ("--host-memory-gb", flags.host_memory_gb)):
        if budget is None:
            raise ValueError(f"{auto} needs {flag}, for a process's model states and activations together")
    chosen_by_auto = {
        "--state-stage": flags.state_stage,
        "--state-window-layers": flags.state_window_layers,
        "--state-host-gb": flags.state_host_gb,
    }
    for flag, value in chosen_by_auto.items():
        if value is not None:
            raise ValueError(f"{auto} chooses the value of {flag}: remove it, or use paged")
    if flags.state_nvme is not None and flags.state_nvme_gb is None:
        raise ValueError(f"{auto} needs --state-nvme-gb with --state-nvme, equal on all machines")
    uncounted = {
        "--num-experts": flags.num_experts,
        "--ngram-layers": flags.ngram_layers,
        "--host-tables embedding": "embedding" in flags.host_tables,
        "--state-update-steps": flags.state_update_steps,
        "--seq1f1b-slices auto": flags.seq1f1b_slices == AUTO,
        "--activation-policy offload by the plan of --hybrid-data-parallel": flags.hybrid_data_parallel
        and flags.activation_policy == "offload"
        and flags.swap_fraction is None,
    }
    for memory, is_set in uncounted.items():
        if is_set:
            raise ValueError(f"{auto} does not count the memory of {memory}: use resident or paged")


@dataclass(frozen=True, slots=True)
class StateOptions:
    """The flags of model states.

    Attributes:
        option: location of the states, or "auto".
        page_bytes: size of a page, in bytes.
        update_steps: number of steps that overlap with an update; 0: updates are exact.
        host_gb: host memory of a process for pages, in GB; None: not given.
        nvme: folder on a local disk for pages, or None.
        nvme_gb: disk space of a process, in GB; None: not given.
    """

    option: StateOption | Literal["auto"]
    page_bytes: int
    update_steps: int = 0
    host_gb: float | None = None
    nvme: Path | None = None
    nvme_gb: float | None = None


def state_options(flags: StateFlags) -> StateOptions:
    """Return the options of model states. Raises ValueError for impossible sizes and combinations."""
    page_bytes = page_bytes_of(flags.state_page_mb, "--state-page-mb")
    for flag, budget in (("--state-host-gb", flags.state_host_gb), ("--state-nvme-gb", flags.state_nvme_gb)):
        if budget is not None and not 0 < budget < math.inf:
            raise ValueError(f"{flag} {budget:g} is not an amount of memory")
    if flags.state_nvme_gb is not None and flags.state_nvme is None:
        raise ValueError("--state-nvme-gb needs --state-nvme")
    if flags.state_update_steps < 0:
        raise ValueError(f"--state-update-steps {flags.state_update_steps} must be at least 0")
    if flags.state_nvme is not None and page_bytes % BLOCK_BYTES:
        raise ValueError(f"--state-page-mb {flags.state_page_mb:g} must be a multiple of 1/256 with --state-nvme")
    return StateOptions(
        option=_option(flags),
        page_bytes=page_bytes,
        update_steps=flags.state_update_steps,
        host_gb=flags.state_host_gb,
        nvme=flags.state_nvme,
        nvme_gb=flags.state_nvme_gb,
    )


def _option(flags: StateFlags) -> StateOption | Literal["auto"]:
    """Return the location of the states. Raises ValueError for an empty window, or a window outside stage 3."""
    if flags.state_policy != "paged":
        return AUTO if flags.state_policy == AUTO else StateOption()
    stage, window = flags.state_stage or 1, flags.state_window_layers
    if window is None:
        return StateOption(stage, WINDOW_LAYERS)
    if stage < 3:
        raise ValueError("--state-window-layers needs --state-stage 3")
    if window < 1:
        raise ValueError(f"--state-window-layers {window} must be at least 1")
    return StateOption(stage, int(window))


@dataclass(frozen=True)
class DeviceFlags:
    """Megatron's arguments and ours, under the same names, that require gradients on the device."""

    overlap_grad_reduce: bool
    overlap_param_gather: bool
    seq1f1b_zero_bubble: bool
    moe_expert_slots: int | None
    ddp_param_name_patterns_for_fp32_local_accumulation: Sequence[str] | None
    gradient_accumulation_fusion: bool

    def are_set(self) -> bool:
        """Return whether any of them is set."""
        return any(getattr(self, field.name) for field in fields(self))


def allowed_stages(flags: DeviceFlags, on_cuda: bool, element_bytes: int) -> tuple[int, ...]:
    """Return the values of ``--state-stage`` that are compatible with the other flags."""
    if flags.are_set():
        return STAGES[:1]
    is_refused = on_cuda and element_bytes == FLOAT_BYTES
    return tuple(stage for stage in STAGES if not (stage == 2 and is_refused))


def resolve(flags: StateFlags, run: RunConfig) -> StateConfig | ResidentStates:
    """Return the page size and page budgets, which suffice for the fullest stage, or the automatic choice.

    Raises ValueError if the folder is not on a local disk, or the pages do not fit.
    """
    options = state_options(flags)
    nvme = nvme_of(options, run.process.rank, flags.exit_signal, is_here=not flags.fake_process_group)
    if run.decision.states is not None:
        return chosen_states(options, run.decision, nvme)
    option, free = run.decision.setup.states.decided, free_bytes_of_process(flags)
    config = StateConfig(
        options.page_bytes,
        min(free, _bytes(options.host_gb)),
        nvme,
        option.stage,
        option.window_layers,
        options.update_steps,
        shares_node=run.decision.setup.sharing_ranks > 1,
    )
    for case in state_cases(run.decision.setup):
        if config.nvme is None or case.host_bytes <= config.host_bytes:
            config.check_fits(case.host_bytes)
        else:
            config.check_fits(case.least_host_bytes, case.file_bytes)
    return config


def chosen_states(options: StateOptions, decision: Decision, nvme: NvmeConfig | None) -> StateConfig | ResidentStates:
    """Return the chosen model states. Raises ValueError if a disk has less space than given."""
    assert decision.states is not None, "the decision includes model states"
    chosen, note = decision.states.chosen, decision.states.described()
    option, page_bytes = chosen.option, options.page_bytes
    if not option.stage:
        return ResidentStates(note)
    host_bytes = decision.setup.budget.host_bytes
    config = StateConfig(
        page_bytes,
        host_bytes,
        stage=option.stage,
        window_layers=option.window_layers,
        shares_node=decision.setup.sharing_ranks > 1,
        note=note,
    )
    if not option.disk_share:
        return config
    assert nvme is not None, "the chosen states need --state-nvme"
    if nvme.num_bytes < decision.setup.budget.disk_bytes:
        raise ValueError(
            f"--state-nvme-gb {options.nvme_gb:g} for each process, and {options.nvme} has "
            f"{nvme.num_bytes / 1e9:.4g} GB: give at most that"
        )
    spare = chosen.state_host_bytes * SPARE_SHARE + SPARE_PAGES * page_bytes
    return replace(config, host_bytes=min(host_bytes, chosen.state_host_bytes + spare), nvme=nvme)


def nvme_of(options: StateOptions, rank: int, exit_signal: int, is_here: bool) -> NvmeConfig | None:
    """Return the disk and its budget. Raises ValueError if the folder is not on a local disk.

    ``is_here``: whether the run is on this machine; a dry run plans for another machine.
    """
    if options.nvme is None:
        return None
    num_bytes = _bytes(options.nvme_gb)
    if is_here:
        check_disk(options.nvme, rank, "--state-nvme")
        num_bytes = min(num_bytes, free_disk_bytes(options.nvme) / local_processes())
    return NvmeConfig(options.nvme, num_bytes, rank, exit_signal)


def _bytes(gigabytes: float | None) -> float:
    """Return a budget in bytes; infinite if not given."""
    return math.inf if gigabytes is None else gigabytes * 1e9


def build(training: Training, runtime: Runtime) -> Training:
    """Report the paged states. Megatron's optimizer is built later, in ``core/optimizer/optimizer.py``."""
    from megatron.training.utils import print_rank_0

    from bytescale_ext.states.node_memory import HostBlocks
    from megatron.bytescale.features.states.late_updates import tell_staleness

    config = runtime.run.find(StateConfig)
    if config is None:
        print_rank_0(runtime.run.get(ResidentStates).note)
        return training
    if config.note:
        print_rank_0(config.note)
    contents = ("", "; gradients in host memory", "; gradients and parameters in host memory")[config.stage - 1]
    contents += ", shared by the processes of a node" if config.stage > 1 and config.shares_node else ""
    window = f", {config.window_layers} layers on the device at a time" if config.stage == 3 else ""
    late = f", updates overlap with {config.update_steps} step(s)" if config.update_steps else ""
    print_rank_0(
        f"> bytescale: Adam's states in pages of {config.page_bytes:,} bytes of host memory{contents}{window}{late}"
    )
    if config.stage > 1:
        runtime.add_parts(host_blocks=HostBlocks(config.shares_node, runtime.run.process.on_cuda))
    return tell_staleness(training, runtime) if config.update_steps else training


def borrowed_flags(flags: StateFlags) -> tuple[str, ...]:
    """Return the flags of activations and costs with which states are chosen."""
    of_choice = ("--host-memory-gb", "--device-memory-gb", "--link-gb-per-second", COST_FLAG)
    return of_choice if flags.state_policy == "auto" else ()


_HOST_GRADIENTS = above("state_stage", HOST_GRADIENTS - 1)
_REDUCED_LATER = "remove it, or use --state-stage 1: gradients are reduced from host memory after the backward pass"
_ON_DEVICE = {
    "--overlap-grad-reduce": _REDUCED_LATER,
    "--overlap-param-gather": _REDUCED_LATER,
    "--seq1f1b-zero-bubble": "remove it, or use --state-stage 1: it adds weight gradients on the device",
    "--moe-expert-slots": "remove it, or use --state-stage 1: it moves gradients on the device",
    "--ddp-param-name-patterns-for-fp32-local-accumulation": "remove it: gradients are summed in float32 already",
}
_COPIED = "remove it: results are copied to parameters unchanged"
REFUSALS = (
    refuse("--optimizer", "states", "use adam", ~equals("optimizer", "adam")),
    refuse("--optimizer-cpu-offload", "states", "remove it: it moves the same states"),
    refuse("--use-precision-aware-optimizer", "states", "remove it: states in pages are float32"),
    refuse("--optimizer-cuda-graph", "states", "remove it: the processor updates"),
    *(refuse(flag, "states", "use --use-distributed-optimizer") for flag in (
        "--use-megatron-fsdp", "--use-torch-fsdp2")),
    refuse("--fp16", "states", "use --bf16: with a loss scale steps may be skipped"),
    *(refuse(flag, "states", _COPIED) for flag in (
        "--fp8-param-gather", "--fp4-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag")),
    refuse("--async-save", "states", "remove it, or --state-nvme: pages change while a save overlaps with training",
           chosen("state_nvme") & given("async_save")),
    *(refuse(f"{flag} with host gradients", "states", why, _HOST_GRADIENTS & given(flag[2:].replace("-", "_")))
      for flag, why in _ON_DEVICE.items()),
    refuse("--log-params-norm", "states", "remove it: it reads the float32 parameters on the device"),
    refuse("gradient accumulation fusion with host gradients", "states",
           "add --no-gradient-accumulation-fusion: Apex's kernel adds gradients on the device",
           _HOST_GRADIENTS & given("gradient_accumulation_fusion")),
)  # fmt: skip

STATES = Feature(
    name="states",
    flag="--state-policy",
    summary="Adam's states in pages of host memory",
    add_arguments=add_arguments,
    is_on=~equals("state_policy", "resident"),
    options=StateFlags,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    needs="--state-policy paged",
    borrows=borrowed_flags,
    refusals=REFUSALS,
)
