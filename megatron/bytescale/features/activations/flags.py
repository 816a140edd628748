"""Activation policies (MEMO; ByteScale section 5.2): saved tensors are kept, swapped to host memory or recomputed."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND, RESIDENT_LAYERS
from bytescale_ext.plan.activation.policies import POLICIES
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND
from bytescale_ext.plan.setup.costs import cost_source
from bytescale_ext.plan.setup.setup import Policy, Setup
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale.arguments.conditions import PLANS_ACTIVATIONS, chosen
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.features.activations.refusals import REFUSALS
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of activation policies."""
    group = parser.add_argument_group("bytescale: activations")
    group.add_argument(
        "--activation-policy",
        choices=POLICIES,
        default="none",
        help="Policy for the tensors that layers save for the backward pass. memo: swap layer inputs and attention "
        "outputs to host memory, and as much of the rest as the link can carry; recompute what remains, but never "
        "attention. priced: the same, but recompute tensors that are cheap to recompute, and use free device memory. "
        "offload: swap a share of every tensor; with --hybrid-data-parallel the plan chooses the share of each "
        "micro-batch, so that a long sequence needs fewer ranks. auto: the policy with the least predicted time. "
        "Default: none. `bytescale activations` predicts each policy's effect on a model.",
    )
    texts = {
        "--swap-fraction F": "Swap this share of the tokens. For memo and priced it is their alpha; without a policy "
        "it applies to all tensors.",
        "--recompute-fraction F": "Recompute this share of the tokens, except attention; 1 alone is full recomputation "
        "without attention. Tokens that are neither swapped nor recomputed stay on the device.",
        "--host-memory-gb G": "Host memory of each process for activations, allocated once when training starts. "
        "Every policy that swaps needs it. With --state-policy auto it is also for model states.",
        "--device-memory-gb G": "Total memory of a device. Training subtracts its parameters, gradients and "
        "optimizer states, and prints what remains for activations. Leave headroom: CUDA, NCCL and fragmentation are "
        "not included. priced, offload and auto need it, except offload with --hybrid-data-parallel, where "
        "--hdp-tokens-per-rank sets the limit.",
        "--link-gb-per-second B": "Speed of each GPU's link to pinned host memory in one direction (55). GPUs that "
        "share a link, for example behind a PCIe switch, share its speed. "
        "scripts/bench/activation/gpu_activations_calibrate.py measures it.",
    }
    for words, text in texts.items():
        flag, metavar = words.split()
        group.add_argument(flag, type=float, metavar=metavar, help=text)


@dataclass(frozen=True)
class PolicyFlags:
    """Flags of activation policies and of memory, and the flags that they depend on; None: not given.

    Attributes:
        activation_policy: name of the policy.
        swap_fraction, recompute_fraction: shares of the tokens.
        device_memory_gb, host_memory_gb: memory of the device, and host memory of a process.
        link_gb_per_second: speed of each GPU's link to host memory.
        hdp_learn_costs: ``off``: speeds that are not given are assumed instead of measured.
        memory_plan, record_memory_plan: files of memory plans.
        hybrid_data_parallel: whether documents are planned.
        transformer_impl: implementation of Megatron's layers.
    """

    activation_policy: str
    swap_fraction: float | None
    recompute_fraction: float | None
    device_memory_gb: float | None
    host_memory_gb: float | None
    link_gb_per_second: float | None
    hdp_learn_costs: str
    memory_plan: Path | None
    record_memory_plan: Path | None
    hybrid_data_parallel: bool
    transformer_impl: str


def before_checks(flags: PolicyFlags) -> Overrides:
    """Load no masks for samples if our attention runs; a mask of all pairs of tokens would exceed other memory."""
    return {"create_attention_mask_in_dataloader": False} if flags.transformer_impl == "local" else NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The options of activation policies and of budgets.

    Attributes:
        policy: name of a policy, or given shares.
        device_gb: memory of the device; None: not given.
        host_gb: host memory of a process; None: not given.
        link_gb: speed of each GPU's link to host memory, in GB/s; None: not given.
        may_measure: whether speeds that are not given may be measured when training starts.
    """

    policy: Policy
    device_gb: float | None = None
    host_gb: float | None = None
    link_gb: float | None = None
    may_measure: bool = True


def policy_options(flags: PolicyFlags) -> PolicyOptions:
    """Return the options of activation policies. Raises ValueError for wrong or missing shares and budgets."""
    has_memory_plan = flags.memory_plan is not None or flags.record_memory_plan is not None
    options = PolicyOptions(
        policy=Policy(flags.activation_policy, flags.swap_fraction, flags.recompute_fraction),
        device_gb=flags.device_memory_gb,
        host_gb=flags.host_memory_gb,
        link_gb=flags.link_gb_per_second,
        may_measure=flags.hdp_learn_costs != "off"
        and not has_memory_plan,  # a memory plan needs equal shares in two runs
    )
    _check_shares(options.policy)
    _check_budgets(options, plans_offload=flags.hybrid_data_parallel and flags.activation_policy == "offload")
    return options


def _check_shares(policy: Policy) -> None:
    """Raise ValueError for shares outside 0 to 1, and for shares that the policy does not accept."""
    if policy.name == "auto" and policy.has_shares:
        raise ValueError("--activation-policy auto chooses the shares: remove --swap-fraction and --recompute-fraction")
    if policy.name == "offload" and policy.recompute:
        raise ValueError("--activation-policy offload recomputes nothing: remove --recompute-fraction")
    for flag, share in (("--swap-fraction", policy.swap), ("--recompute-fraction", policy.recompute)):
        if share is not None and not 0.0 <= share <= 1.0:
            raise ValueError(f"{flag} {share:g} must be a share of the tokens, from 0 to 1")
    if (policy.swap or 0.0) + (policy.recompute or 0.0) > 1.0:
        raise ValueError(
            f"--swap-fraction {policy.swap:g} and --recompute-fraction {policy.recompute:g} sum to more than 1; tokens "
            "that are neither swapped nor recomputed stay on the device"
        )


def _check_budgets(options: PolicyOptions, plans_offload: bool) -> None:
    """Raise ValueError for a missing or impossible budget or link speed."""
    policy = options.policy
    if options.host_gb is None and (policy.name != "none" or policy.swap):
        raise ValueError("give --host-memory-gb, the host memory of each process for activations")
    needs_device = policy.name in ("priced", "offload", "auto") and not policy.has_shares and not plans_offload
    if options.device_gb is None and needs_device:
        raise ValueError(f"--activation-policy {policy.name} needs --device-memory-gb, the memory of the device")
    for flag, value in (("--host-memory-gb", options.host_gb), ("--device-memory-gb", options.device_gb)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag} {value:g} is not an amount of memory")
    if options.link_gb is not None and not 0 < options.link_gb < math.inf:
        raise ValueError(f"--link-gb-per-second {options.link_gb:g} must be positive and finite")


def check_planned_offload(setup: Setup, options: PolicyOptions) -> None:
    """Raise ValueError for settings that prevent the plan of a step from choosing shares to offload."""
    policy = "--activation-policy offload by the plan of --hybrid-data-parallel"
    by_share = "or give --swap-fraction, the same share for all micro-batches"
    if options.device_gb is not None:
        raise ValueError(f"{policy}: --hdp-tokens-per-rank limits the device's memory; remove --device-memory-gb")
    if setup.planning.static_width is not None:
        raise ValueError(
            f"{policy} does not work with --hdp-static-width, whose widths are fixed: remove it, {by_share}"
        )
    if setup.shape.num_experts:
        raise ValueError(
            f"{policy} does not work with --num-experts: experts keep their tensors on the device, so offloading the "
            f"rest makes no room for more tokens; use priced, {by_share}"
        )
    if setup.slicing != ONE_SLICE:
        raise ValueError(
            f"{policy} does not work with --seq1f1b-slices, which already need less memory; remove one,  {by_share}"
        )
    layers_of_process = min(setup.mesh.stage_layers)
    if layers_of_process <= RESIDENT_LAYERS:
        raise ValueError(
            f"{policy} keeps {RESIDENT_LAYERS} layers of each process on the device, and a process has "
            f"{layers_of_process}: use fewer pipeline stages, {by_share}"
        )


def resolve(flags: PolicyFlags, run: RunConfig) -> ActivationConfig:
    """Return the activation policy of this process."""
    options = policy_options(flags)
    assumed, measured = assumptions(options, run), measures(options, run)
    return ActivationConfig(run.decision, run.process.stage, assumed=assumed, measures=measured)


def assumptions(options: PolicyOptions, run: RunConfig) -> str:
    """Return a line about assumed speeds, with the flags that replace them; "" if no speeds are assumed."""
    speeds = []
    if options.link_gb is None and options.host_gb:
        speeds.append(
            f"{LINK_BYTES_PER_SECOND / 1e9:g} GB/s to host memory (give --link-gb-per-second; "
            "scripts/bench/activation/gpu_activations_calibrate.py measures it)"
        )
    if run.cost is None:
        between = f" and {COLLECTIVE_BYTES_PER_SECOND / 1e9:g} GB/s between tensor-parallel ranks"
        speeds.append(
            f"layers as fast as in {cost_source(run.decision.setup)}"
            f"{between if run.process.tensor_parallel > 1 else ''} (give --cost-file; `bytescale profile` measures "
            "them)"
        )
    return f"> bytescale: assumed, not measured: {'; '.join(speeds)}" if speeds else ""


def measures(options: PolicyOptions, run: RunConfig) -> tuple[str, ...]:
    """Return the speeds to measure when training starts, because the policy chooses shares with them."""
    if not options.may_measure or options.policy.name == "none" or options.policy.has_shares:
        return ()
    measured = ["layers"] * (run.cost is None)
    return (*measured, "link") if options.link_gb is None and options.host_gb else tuple(measured)


def build(training: Training, runtime: Runtime) -> Training:
    """Plan the saved tensors of each layer for each micro-batch."""
    from megatron.bytescale.features.activations import build as activations

    return activations.plan_activations(training, runtime)


ACTIVATIONS = Feature(
    name="activations",
    flag="--activation-policy",
    summary="activation policies: saved tensors are kept, swapped or recomputed",
    add_arguments=add_arguments,
    is_on=PLANS_ACTIVATIONS | chosen("memory_plan") | chosen("record_memory_plan"),
    options=PolicyFlags,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    borrows=lambda flags: ("--hdp-learn-costs",),
    needs="--activation-policy, --swap-fraction or --recompute-fraction",
    reads_cost=True,
    refusals=REFUSALS,
)
