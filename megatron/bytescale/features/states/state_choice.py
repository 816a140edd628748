"""``--state-policy auto``: the problem of a run, and what its choice makes of model states and activations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.memory.states import ResidentStates, StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.activation.load import LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.states.choice import StageProblem, StateChoice, StateProblem, all_options, choose_states
from bytescale_ext.plan.states.pages import FLOAT_BYTES, page_bytes_of
from bytescale_ext.plan.states.timeline import (
    ADAM_BYTES_PER_SECOND,
    IN_HOST,
    READ_BYTES_PER_SECOND,
    WRITE_BYTES_PER_SECOND,
    Speeds,
)
from megatron.bytescale.arguments.stage_layers import stage_settings
from megatron.bytescale.features.activations.flags import policy_of
from megatron.bytescale.features.states.flags import ON_DEVICE, STAGES, cases, has_fused_norms, resolve_nvme

AUTO = "--state-policy auto"
SPARE_SHARE, SPARE_PAGES = 0.02, 16
"""What real pages may take beyond the forecast, which counts neither biases nor the last pages of groups."""


def check_auto(args: Any) -> None:
    """Raise ValueError for flags that the choice needs, makes itself, or cannot count."""
    for flag in ("--device-memory-gb", "--host-memory-gb"):
        if getattr(args, flag[2:].replace("-", "_")) is None:
            raise ValueError(f"{AUTO} needs {flag}, for the model states and activations of a process together")
    made = {
        "--state-stage": args.state_stage,
        "--state-window-layers": args.state_window_layers,
        "--state-host-gb": args.state_host_gb,
    }
    for flag, value in made.items():
        if value is not None:
            raise ValueError(f"{AUTO} chooses what {flag} sets: remove it, or use paged")
    if args.state_nvme is not None and args.state_nvme_gb is None:
        raise ValueError(f"{AUTO} needs --state-nvme-gb with --state-nvme, equal on all machines")
    uncounted = {
        "--num-experts": args.num_experts,
        "--ngram-layers": args.ngram_layers,
        "--embedding-storage host": args.embedding_storage == "host",
        "--state-update lock-free": args.state_update != "exact",
        "--seq1f1b-slices auto": args.seq1f1b_slices == "auto",
        "--activation-policy offload by the plan of --hybrid-data-parallel": args.hybrid_data_parallel
        and args.activation_policy == "offload"
        and args.swap_fraction is None,
    }
    for what, is_set in uncounted.items():
        if is_set:
            raise ValueError(f"{AUTO} does not count what {what} takes: use resident or paged")


def choice_of(args: Any, run: RunConfig, config: ActivationConfig) -> StateChoice:
    """Return the choice, equal on all ranks; ``config``: the activation policy with the whole budgets.

    Raises ValueError, naming the least budget that would do, where nothing fits.
    """
    machine, last = config.machine, len(run.stage_layers) - 1
    stages = []
    for number, case in enumerate(cases(args, run, page_bytes_of(args.state_page_mb, "--state-page-mb"))):
        settings = stage_settings(args, run, number)
        of_stage = config.on_stage(settings)
        head = config.cost.head_forward + config.cost.head_backward
        stages.append(
            StageProblem(
                case=case,
                load=of_stage.largest,
                policy=partial(planned, of_stage),
                end_seconds=of_stage.largest.num_tokens * head * (number == last),
                key_bytes=settings.key_host_bytes,
            )
        )
    speeds = Speeds(machine.link_bytes_per_second, ADAM_BYTES_PER_SECOND, READ_BYTES_PER_SECOND, WRITE_BYTES_PER_SECOND)
    update_speed = machine.memory_bytes_per_second
    if not run.process.on_cuda:  # the processor updates resident states too, and copies pages itself
        speeds, update_speed = replace(speeds, in_host=IN_HOST), ADAM_BYTES_PER_SECOND
    return choose_states(
        StateProblem(
            stages=tuple(stages),
            machine=machine,
            speeds=speeds,
            update_bytes_per_second=update_speed,
            disk_bytes=(args.state_nvme_gb or 0.0) * 1e9,
            num_microbatches=num_microbatches(args, run) * len(config.slices),
            num_ranks=args.data_parallel_size * args.context_parallel_size,
            options=all_options(allowed_stages(args, run), args.state_nvme is not None),
        )
    )


def planned(config: ActivationConfig, load: LayerLoad, left: Machine) -> ActivationPlan:
    """Return the plan of a load with what is left of the budgets. Raises ValueError where none fits."""
    return replace(config, machine=left).plan(load)


def num_microbatches(args: Any, run: RunConfig) -> int:
    """Return the micro-batches of a rank and step; of documents, if these are as long as ``--seq-length``."""
    hdp = run.find(HdpConfig)
    if hdp is None:
        return max(1, int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)))
    tokens = hdp.global_tokens or args.global_batch_size * args.seq_length
    return max(1, -(-int(tokens) // (run.cluster.num_ranks * run.cluster.tokens_per_rank)))


def allowed_stages(args: Any, run: RunConfig) -> tuple[int, ...]:
    """Return the ``--state-stage``s that work with the other flags."""
    if has_fused_norms() or any(getattr(args, flag[2:].replace("-", "_")) for flag in ON_DEVICE):
        return STAGES[:1]
    is_refused = run.process.on_cuda and args.params_dtype.itemsize == FLOAT_BYTES
    return tuple(stage for stage in STAGES if not (stage == 2 and is_refused))


def beside_states(args: Any, run: RunConfig, config: ActivationConfig) -> ActivationConfig:
    """Return an activation policy with what the chosen states leave of its budgets and of the link."""
    chosen = choice_of(args, run, config).chosen
    return replace(config, machine=chosen.left, link_share=chosen.link_share)


def chosen_states(args: Any, run: RunConfig) -> StateConfig | ResidentStates:
    """Return what was chosen. Raises ValueError where nothing fits, or a disk has less than it is said to have."""
    page_bytes = page_bytes_of(args.state_page_mb, "--state-page-mb")
    nvme = resolve_nvme(args, run, page_bytes)
    found = choice_of(args, run, policy_of(args, run))
    option, note = found.chosen.option, found.described()
    if not option.stage:
        return ResidentStates(note)
    host_bytes = args.host_memory_gb * 1e9
    if not option.disk_share:
        return StateConfig(page_bytes, host_bytes, None, option.stage, option.window_layers, note=note)
    assert nvme is not None
    if nvme.num_bytes < args.state_nvme_gb * 1e9:
        raise ValueError(
            f"--state-nvme-gb {args.state_nvme_gb:g} for each process, and {args.state_nvme} has "
            f"{nvme.num_bytes / 1e9:.4g} GB: give at most that"
        )
    spare = found.chosen.state_host_bytes * SPARE_SHARE + SPARE_PAGES * page_bytes
    host_bytes = min(host_bytes, found.chosen.state_host_bytes + spare)
    return StateConfig(page_bytes, host_bytes, nvme, option.stage, option.window_layers, note=note)
