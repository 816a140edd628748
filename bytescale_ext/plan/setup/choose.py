"""Slices, activation policy and model states of a setup, chosen together, once.

Model states, activations and keys share the memory of a device. If the place of model states is open, it is chosen
first, with the activation plan of each option (``plan/states/choice.py``). The slices of each step, and the shares of
the policy, are chosen within the remaining memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

from bytescale_ext.plan.activation.load import LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS, SlicingChoice
from bytescale_ext.plan.setup.costs import slowest_stage
from bytescale_ext.plan.setup.layers import setup_slice_lengths, stage_settings
from bytescale_ext.plan.setup.memory import stage_memory, stage_state_bytes, stage_update_bytes, state_cases
from bytescale_ext.plan.setup.offload import PlannedOffload, planned_offload
from bytescale_ext.plan.setup.policy import PolicySlices, StagePolicy, stage_policy
from bytescale_ext.plan.setup.setup import AUTO, Setup
from bytescale_ext.plan.states.choice import StageProblem, StateChoice, StateProblem, all_options, choose_states
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True)
class Decision:
    """Setup with all choices made, except the slices of each step if ``slices`` chooses them.

    Attributes:
        setup: setup with decided model states.
        states: choice of model states with its reasons; None if they were given.
        link_share: share of the link that copies of parameters to the device leave to activations.
        slices: function that chooses the slices of each step; None if they are given.
        offload: limits within which the plan of a step offloads activations; None if it does not.
    """

    setup: Setup
    states: StateChoice | None = None
    link_share: float = 1.0
    slices: SlicingChoice | PolicySlices | None = None
    offload: PlannedOffload | None = None

    @property
    def finest(self) -> Slicing:
        """Given slices, or the option with the most slices, without kept keys, if the planner chooses."""
        if self.slices is None:
            return self.setup.given_slicing
        return OPTIONS[-1]

    def policy(self, stage: int, slicing: Slicing | None = None) -> StagePolicy:
        """Return the activation policy on a stage, in the slices of a step or in the given slices."""
        return stage_policy(self.setup, stage, slicing or self.setup.given_slicing, self.link_share)

    @property
    def offloading_layers(self) -> int | None:
        """Number of layers of a rank for the check of plans that may offload activations, else None."""
        return None if self.offload is None else self.offload.limits.num_layers

    @cached_property
    def left_bytes(self) -> tuple[float, ...]:
        """Device memory that the model states of each stage leave to activations and keys."""
        device_bytes = self.setup.budget.device_bytes
        return tuple(device_bytes - states for states in stage_state_bytes(self.setup))


def choose(setup: Setup) -> Decision:
    """Return the decision about a setup, equal on all ranks.

    Raises:
        ValueError: nothing fits. The message names a sufficient budget of device or host memory.
    """
    decision = decide(setup)
    check_fits(decision)
    return decision


def decide(setup: Setup) -> Decision:
    """Return the decision about a setup without checking that activations and keys fit in the memory.

    Raises:
        ValueError: no place of model states fits, or plans cannot offload enough.
    """
    states, link_share = None, 1.0
    if setup.states.option == AUTO:
        states = choose_states(state_problem(setup))
        setup, link_share = setup.with_option(states.chosen.option), states.chosen.link_share
    offload = planned_offload(setup) if setup.plans_offload else None
    return Decision(setup, states, link_share, slice_chooser(setup, link_share), offload)


def choose_activations(decision: Decision, cost: ModelCost, link_bytes_per_second: float) -> Decision:
    """Return a decision that plans activations with measured speeds. Model states stay as they are.

    Raises:
        ValueError: nothing fits with these speeds.
    """
    budget = replace(decision.setup.budget, link_bytes_per_second=link_bytes_per_second)
    setup = replace(decision.setup, cost=cost, budget=budget)
    offload = planned_offload(setup) if setup.plans_offload else None
    measured = replace(decision, setup=setup, slices=slice_chooser(setup, decision.link_share), offload=offload)
    check_fits(measured)
    return measured


def slice_chooser(setup: Setup, link_share: float = 1.0) -> SlicingChoice | PolicySlices | None:
    """Return the function that chooses the slices of each step, or None if the slices are given."""
    if not setup.chooses_slices:
        return None
    if setup.policy.is_on:
        return PolicySlices(setup, link_share)
    host_bytes = setup.budget.host_bytes if setup.swaps_keys else 0.0
    return SlicingChoice.within(stage_memory(setup), setup.budget.device_bytes, host_bytes)


def check_fits(decision: Decision) -> None:
    """Raise ValueError, which names a sufficient budget, if a decision does not fit on every stage."""
    setup, slices = decision.setup, decision.slices
    _check_update(decision)
    if isinstance(slices, SlicingChoice):
        slices.check_fits(slowest_stage(setup)[1].both, setup.cluster.tokens_per_rank)
    elif isinstance(slices, PolicySlices):
        slices.check_fits()
    elif setup.policy.is_on and not setup.plans_offload:
        for stage in range(setup.mesh.num_stages):
            decision.policy(stage).check_fits()
    if slices is None and setup.swaps_keys:
        _check_host_memory(setup)


def _check_update(decision: Decision) -> None:
    """Raise ValueError if the update of the optimizer exceeds the device memory on a stage."""
    update = stage_update_bytes(decision.setup)
    over = max(needed - left for needed, left in zip(update, decision.left_bytes, strict=True))
    if max(update) and over > 0:
        device_bytes = decision.setup.budget.device_bytes
        raise ValueError(
            f"the optimizer's update takes {in_gigabytes(device_bytes + over)} GB of device memory with the model "
            f"states, and --device-memory-gb is {device_bytes / 1e9:.4g}: give at least that, or share the optimizer "
            "among more ranks (--use-distributed-optimizer)"
        )


def _check_host_memory(setup: Setup) -> None:
    """Raise ValueError if the swapped keys of the longest documents exceed the host memory on a stage."""
    slicing, host_bytes = setup.given_slicing, setup.budget.host_bytes
    stages = range(setup.mesh.num_stages)
    needed = max(stage_settings(setup, stage, slicing).key_host_bytes for stage in stages)
    if needed > host_bytes:
        raise ValueError(
            f"keys of documents of up to {slicing.swapped_tokens} tokens take {in_gigabytes(needed)} GB of host "
            f"memory, and --host-memory-gb is {host_bytes / 1e9:.4g}: give at least that, or swap fewer keys"
        )


def state_problem(setup: Setup) -> StateProblem:
    """Return the problem of the choice of model states. Activations get the budgets that states leave."""
    slicing, last = setup.given_slicing, setup.mesh.last_stage
    budget, states = setup.budget, setup.states
    whole = replace(setup, states=replace(states, option=StateOption()))  # the policy gets its budgets by the option
    head = setup.cost.head_forward + setup.cost.head_backward
    stages = []
    for stage, case in enumerate(state_cases(setup)):
        of_stage = stage_policy(whole, stage, slicing)
        load = of_stage.largest
        stages.append(
            StageProblem(
                case=case,
                load=load,
                policy=partial(_plan_within, of_stage),
                end_seconds=load.num_tokens * head * (stage == last),
                key_bytes=of_stage.layers.key_host_bytes,
            )
        )
    return StateProblem(
        stages=tuple(stages),
        machine=budget.machine(budget.device_bytes, budget.host_bytes),
        speeds=replace(states.speeds, link_bytes_per_second=budget.link_bytes_per_second),
        update_bytes_per_second=states.update_bytes_per_second,
        disk_bytes=budget.disk_bytes,
        num_microbatches=setup.sequences.micro_batches * len(setup_slice_lengths(setup, slicing)),
        num_ranks=setup.cluster.num_ranks,
        options=all_options(states.allowed, states.has_disk),
    )


def _plan_within(policy: StagePolicy, load: LayerLoad, left: Machine) -> ActivationPlan:
    """Return the plan of a load within the remaining budgets. Raises ValueError if none fits."""
    return replace(policy, machine=left).plan(load)


def remaining_text(decision: Decision) -> str:
    """Return a line about device memory of model states and the rest; "" without a budget."""
    device_bytes = decision.setup.budget.device_bytes
    if device_bytes == float("inf"):
        return ""
    left = min(decision.left_bytes)
    stage = decision.left_bytes.index(left)
    where = f" on stage {stage}, the fullest" if decision.setup.mesh.num_stages > 1 else ""
    return (
        f"> bytescale: device memory {device_bytes / 1e9:.4g} GB{where}: model states "
        f"{(device_bytes - left) / 1e9:.4g} GB, which leaves {left / 1e9:.4g} GB for activations and keys"
    )
