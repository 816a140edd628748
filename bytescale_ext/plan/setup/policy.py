"""Pipeline stages under an activation policy: plans, time and memory of their micro-batches in each slicing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from bytescale_ext.plan.activation.forecast import ActivationForecast, forecast, stage_cost
from bytescale_ext.plan.activation.load import LayerLoad, LayerSettings, Machine, full_load, load_of_tokens
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import given_plan, in_gigabytes, make_plan, priced_or_none
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.policy_choice import PolicyChoice, PolicyOption, policy_slicings
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.hdp.table import Place
from bytescale_ext.plan.setup.layers import setup_slice_lengths, stage_settings
from bytescale_ext.plan.setup.memory import stage_state_bytes, stage_update_bytes, state_cases
from bytescale_ext.plan.setup.setup import Policy, Setup
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class StagePolicy:
    """An activation policy on one pipeline stage, in micro-batches of one slicing.

    Attributes:
        policy: policy by name, or given shares.
        cost: seconds of the model.
        machine: memory and link that model states and keys leave to activations.
        layers: settings of the stage's layers.
        num_tokens: tokens of the largest micro-batch on one rank.
        longest: tokens of the longest sequence.
        slices: tokens of each slice of a micro-batch, or their proportion.
        by_plan: whether the plan of each step decides the offloaded share of a micro-batch.
    """

    policy: Policy
    cost: ModelCost
    machine: Machine
    layers: LayerSettings
    num_tokens: int
    longest: int
    slices: tuple[int, ...] = (1,)
    by_plan: bool = False

    @cached_property
    def largest(self) -> LayerLoad:
        """Load of the largest micro-batch, or of its largest slice."""
        return full_load(self.cost, self.num_tokens, self.longest, self.layers, self.slices)

    def load(self, num_tokens: int, forward_seconds: float, backward_seconds: float) -> LayerLoad:
        """Return the load of one micro-batch from its tokens and the seconds of one layer."""
        return load_of_tokens(self.cost, num_tokens, forward_seconds, backward_seconds, self.layers)

    def plan(self, load: LayerLoad, share: float = 0.0) -> ActivationPlan:
        """Return the plan of a micro-batch. ``share``: offloaded share, if the plan of the step chooses shares.

        Raises:
            ValueError: the policy does not fit. If a load fits, all smaller loads fit.
        """
        resident = min(self.layers.resident_layers, load.num_layers)
        if self.by_plan:
            return given_plan("offload", share, None, resident)
        if not self.policy.has_shares:
            return make_plan(self.policy.name, load, self.machine)
        return given_plan(self.policy.name, self.policy.swap, self.policy.recompute, resident)

    def planned(self) -> tuple[ActivationPlan, ActivationForecast] | None:
        """Return the plan of the largest micro-batch with its forecast, or None if it does not fit."""
        if self.policy.name == "priced" and not self.policy.has_shares:
            plan = priced_or_none(self.largest, self.machine)
            return None if plan is None else (plan, forecast(plan, self.largest, self.machine))
        try:
            plan = self.plan(self.largest)
        except ValueError:
            return None
        predicted = forecast(plan, self.largest, self.machine)
        return (plan, predicted) if predicted.fits(self.machine) else None

    def check_fits(self) -> None:
        """Raise ValueError, which names a sufficient budget, if the largest micro-batch exceeds a budget."""
        load, machine = self.largest, self.machine
        plan = self.plan(load)
        needed = forecast(plan, load, machine)
        subject = f"micro-batches of {load.num_tokens} tokens with {plan.swap:.3g} of the tokens swapped"
        if needed.host_bytes > machine.host_bytes * _ROUNDING:
            raise ValueError(
                f"{subject} take {in_gigabytes(needed.host_bytes)} GB of host memory, and --host-memory-gb is "
                f"{machine.host_bytes / 1e9:.4g}: give at least that, or swap less"
            )
        if needed.device_bytes > machine.device_bytes * _ROUNDING:
            whole = needed.device_bytes + machine.state_bytes
            raise ValueError(
                f"{subject} and {machine.state_bytes / 1e9:.4g} GB of model states take {in_gigabytes(whole)} GB of "
                f"device memory, and --device-memory-gb is {(machine.device_bytes + machine.state_bytes) / 1e9:.4g}: "
                "give at least that, or fewer tokens, or a policy that keeps less"
            )

    def described(self) -> str:
        """Return a line about the plan of the largest micro-batch."""
        load = self.largest
        plan = self.plan(load)
        predicted = forecast(plan, load, self.machine)
        return (
            f"> bytescale: activations {plan.policy}: swapped {plan.swap:.3f}, kept {plan.keep:.3f}, recomputed "
            f"{plan.recompute:.3f}, layer inputs and attention outputs swapped {plan.input_swap:.3f}; predicted for "
            f"{load.num_tokens} tokens: layers {predicted.step_seconds * 1e3:.4g} ms, device "
            f"{predicted.device_bytes / 1e9:.4g} GB, host {predicted.host_bytes / 1e9:.4g} GB"
        )


def stage_policy(setup: Setup, stage: int, slicing: Slicing = ONE_SLICE, link_share: float = 1.0) -> StagePolicy:
    """Return the policy on a stage within the budgets that model states and keys leave.

    Args:
        setup: setup with decided model states.
        stage: number of the stage.
        slicing: slices of a micro-batch.
        link_share: share of the link that parameters on their way to the device leave to activations.
    """
    settings = stage_settings(setup, stage, slicing)
    return StagePolicy(
        policy=setup.policy,
        cost=setup.cost,
        machine=stage_machine(setup, stage, settings.key_host_bytes, link_share),
        layers=settings,
        num_tokens=setup.cluster.tokens_per_rank,
        longest=setup.sequences.longest,
        slices=setup_slice_lengths(setup, slicing),
        by_plan=setup.plans_offload,
    )


def stage_machine(setup: Setup, stage: int, key_bytes: float = 0.0, link_share: float = 1.0) -> Machine:
    """Return the memory and the link that model states and keys leave to activations of a stage.

    ``key_bytes``: keys of slices in host memory; ``link_share``: see ``stage_policy``.
    """
    budget, states = setup.budget, stage_state_bytes(setup)[stage]
    host_bytes = budget.host_bytes - key_bytes
    if setup.states.shares_budget:
        host_bytes -= setup.states.decided.host_bytes(state_cases(setup)[stage])
    return Machine(
        budget.device_bytes - states,
        host_bytes,
        budget.link_bytes_per_second * link_share,
        budget.memory_bytes_per_second,
        states,
    )


@dataclass(frozen=True, slots=True)
class UnderPolicy:
    """Cost and memory of the stages under a policy, in one slicing.

    Attributes:
        slicing: slices of a micro-batch, with the length limit of kept keys.
        stages: cost of each stage, with recomputation and with copies that do not overlap with computation.
        virtual: cost of each virtual stage, chunk by chunk.
        forecasts: time and memory of the largest micro-batch of each stage.
        state_bytes: device memory of the model states of each stage.
        update_bytes: device memory that the update of each stage takes, when no activations exist.
        keeps_all: whether every stage keeps all activations.
    """

    slicing: Slicing
    stages: tuple[StageCost, ...]
    virtual: tuple[StageCost, ...]
    forecasts: tuple[ActivationForecast, ...]
    state_bytes: tuple[float, ...]
    update_bytes: tuple[float, ...]
    keeps_all: bool

    @property
    def slowest(self) -> StageCost:
        """Cost of the stage that planners balance."""
        return max(self.stages, key=lambda stage: stage.both.b)

    @property
    def device_bytes(self) -> float:
        """Peak memory of the fullest device, with model states."""
        stages = zip(self.state_bytes, self.update_bytes, self.forecasts, strict=True)
        return max(states + max(update, predicted.device_bytes) for states, update, predicted in stages)

    @property
    def host_bytes(self) -> float:
        """Peak host memory of a process for activations."""
        return max(predicted.host_bytes for predicted in self.forecasts)


def under_policy(setup: Setup, slicing: Slicing = ONE_SLICE, link_share: float = 1.0) -> UnderPolicy | None:
    """Return cost and memory of the stages under the policy, or None if it does not fit on some stage."""
    mesh, plans, forecasts, policies = setup.mesh, [], [], []
    for stage in range(mesh.num_stages):
        of_stage = stage_policy(setup, stage, slicing, link_share)
        planned = of_stage.planned()
        if planned is None:
            return None
        policies.append(of_stage)
        plans.append(planned[0])
        forecasts.append(planned[1])

    def cost(stage: int, has_head: bool, chunks: int = 1) -> StageCost:
        of_stage = policies[stage]
        return stage_cost(setup.cost, of_stage.largest, plans[stage], of_stage.machine, has_head, chunks)

    stages = tuple(cost(stage, stage == mesh.last_stage) for stage in range(mesh.num_stages))
    virtual, chunks = stages, mesh.virtual_stages
    if chunks > 1:
        virtual = tuple(
            cost(stage, stage == mesh.last_stage and chunk == chunks - 1, chunks)
            for chunk in range(chunks)
            for stage in range(mesh.num_stages)
        )
    keeps_all = all(plan.is_off for plan in plans)
    states, update = stage_state_bytes(setup), stage_update_bytes(setup)
    return UnderPolicy(slicing, stages, virtual, tuple(forecasts), states, update, keeps_all)


@dataclass(frozen=True)
class PolicySlices:
    """Chooses the slices of each step under a policy, as a pure function.

    A search has many strategies and plans few of them, so slicings are computed at their first use.

    Attributes:
        setup: setup with decided model states.
        link_share: see ``stage_policy``.
    """

    setup: Setup
    link_share: float = 1.0

    @property
    def slicings(self) -> list[Slicing]:
        """Slicings to choose from, whether the policy fits or not."""
        return policy_slicings(OPTIONS, self.setup.sequences.longest)

    @property
    def options(self) -> tuple[Slicing, ...]:
        """Slicings that fit under the policy on every stage."""
        return tuple(option.slicing for option in self.fitting)

    @cached_property
    def fitting(self) -> tuple[UnderPolicy, ...]:
        """Cost and memory of the stages in each slicing that fits."""
        return tuple(self._fitting(self.slicings))

    @property
    def fits(self) -> bool:
        """Whether the policy fits in some slices. Whole micro-batches are tried first, because they are fast."""
        whole, *sliced = self.slicings
        return next(iter(self._fitting((whole, *reversed(sliced)))), None) is not None

    def of(self, slicing: Slicing) -> UnderPolicy:
        """Return the stages in a chosen slicing."""
        return next(option for option in self.fitting if option.slicing == slicing)

    def check_fits(self) -> None:
        """Raise ValueError about the finest slices if the policy fits in no slices."""
        if self.fits:
            return
        finest = self.slicings[-1].num_slices
        slicing = next(option for option in self.slicings if option.num_slices == finest)
        for stage in range(self.setup.mesh.num_stages):
            stage_policy(self.setup, stage, slicing, self.link_share).check_fits()

    def described(self, policy: str) -> str:
        """Return a line about the slices that fit under the policy of this name."""
        counts = ", ".join(str(count) for count in dict.fromkeys(option.num_slices for option in self.options))
        return (
            f"> bytescale: activations {policy}: shares follow from the slices of each step; they fit in {counts} "
            f"slices, in {len(self.fitting)} of {len(self.slicings)} combinations of slices, order and kept keys"
        )

    def __call__(self, problem: Problem, place: Place) -> tuple[Slicing, PlacedRanks]:
        """Return the slices of a step and its placement; see ``PolicyChoice``."""
        return self._choice(problem, place)

    @cached_property
    def _choice(self) -> PolicyChoice:
        return PolicyChoice(tuple(PolicyOption(option.slicing, option.slowest) for option in self.fitting))

    def _fitting(self, slicings: Iterable[Slicing]) -> Iterable[UnderPolicy]:
        options = (under_policy(self.setup, slicing, self.link_share) for slicing in slicings)
        return (option for option in options if option is not None)
