"""Stages under the activation policy ``priced``: what they take and hold in whole micro-batches, chunks and slices.

Where the planner chooses the slices of a step under a policy, it chooses as in training: among the slicings in which
the policy fits on every stage, each at the cost of its slowest stage. A search has many strategies and plans few of
them, so all slicings are worked out when they are first needed; whether any fits is known from the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from bytescale_ext.plan.activation.forecast import forecast, stage_cost
from bytescale_ext.plan.activation.load import RESIDENT_LAYERS, HeldSlices, LayerSettings, Machine, full_load
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.activation.policies import priced_or_none
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.policy_choice import PolicyChoice, PolicyOption, policy_slicings
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.hdp.table import Place
from bytescale_ext.plan.memory.held import MANY_GROUPS, held_slices
from bytescale_ext.plan.memory.stage_memory import LayerBytes, head_bytes
from bytescale_ext.plan.schedule.actions import SliceSchedule, most_slices, seq1f1b_schedule
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing


@dataclass(frozen=True, slots=True)
class UnderPolicy:
    """What the policy makes of the stages in one slicing.

    Attributes:
        slicing: of micro-batches, with the longest document whose keys are kept.
        stages: cost of each, in seconds, with what is rebuilt and with copies that nothing hides.
        virtual: the same of each virtual stage, chunk by chunk.
        device_bytes: the most memory of a device, with the model states.
        host_bytes: the most host memory of a process.
        keeps_all: the policy has nothing to do on any stage.
    """

    slicing: Slicing
    stages: tuple[StageCost, ...]
    virtual: tuple[StageCost, ...]
    device_bytes: float
    host_bytes: float
    keeps_all: bool

    @property
    def slowest(self) -> StageCost:
        """The stage that planners balance, as in training."""
        return max(self.stages, key=lambda stage: stage.both.b)


@dataclass(frozen=True)
class PricedStages:
    """The stages of a strategy under the policy.

    Attributes:
        strategy: with its budgets.
        cost: of the model on the tensor-parallel ranks of the strategy.
        cluster: its HDP ranks.
        state_bytes: parameters, gradients and optimizer states of a device of each stage.
        context: tokens of the longest document.
        link_bytes_per_second: between a device and host memory, one way.
        operators: of a layer.
    """

    strategy: Strategy
    cost: ModelCost
    cluster: Cluster
    state_bytes: tuple[float, ...]
    context: int
    link_bytes_per_second: float
    operators: LayerOperators = FUSED

    def under_policy(self, slicing: Slicing = ONE_SLICE, lengths: tuple[int, ...] = (1,)) -> UnderPolicy | None:
        """Return what the policy makes of the stages, or None where it does not fit on one of them.

        Args:
            slicing: of micro-batches.
            lengths: tokens of each slice of the longest document, or their proportion.
        """
        assert self.strategy.device_gb is not None, self.strategy
        machine = Machine(self.strategy.device_gb * 1e9, self.strategy.host_gb * 1e9, self.link_bytes_per_second)
        last, chunks, costs = len(self.state_bytes) - 1, self.strategy.chunks, []
        device_bytes, host_bytes, keeps_all = 0.0, 0.0, True
        for stage, states in enumerate(self.state_bytes):
            how = self.settings(stage, slicing, lengths)
            load = full_load(self.cost, self.cluster.tokens_per_rank, self.context, how, lengths)
            plan = priced_or_none(load, machine)
            if plan is None:
                return None
            found = forecast(plan, load, machine)
            costs.append(partial(stage_cost, self.cost, load, plan, machine))
            device_bytes = max(device_bytes, states + found.device_bytes)
            host_bytes = max(host_bytes, found.host_bytes)
            keeps_all &= plan.is_off
        virtual = stages = tuple(cost(stage == last) for stage, cost in enumerate(costs))
        if chunks > 1:
            ends = [(stage, cost, chunk == chunks - 1) for chunk in range(chunks) for stage, cost in enumerate(costs)]
            virtual = tuple(cost(stage == last and is_end, chunks) for stage, cost, is_end in ends)
        return UnderPolicy(slicing, stages, virtual, device_bytes, host_bytes, keeps_all)

    def settings(self, stage: int, slicing: Slicing, lengths: tuple[int, ...]) -> LayerSettings:
        """Return how a stage runs its layers; for the arguments see ``under_policy``."""
        strategy, num_stages, chunks = self.strategy, len(self.state_bytes), self.strategy.chunks
        in_flight = most_slices(num_stages, slicing, stage, chunks)
        return LayerSettings(
            num_layers=strategy.stage_layers[stage],
            resident_layers=RESIDENT_LAYERS if in_flight == 1 else 0,
            in_flight=in_flight,
            element_bytes=self.cost.element_bytes,
            sequence_parallel=strategy.tensor_parallel > 1,
            operators=self.operators,
            loss_tokens=strategy.loss_tokens if stage == num_stages - 1 else 0,
            slices=self._held(stage, slicing, lengths) if slicing.num_slices > 1 or chunks > 1 else (),
            expert_load=EXPERT_LOAD if strategy.expert_parallel > 1 else 1.0,
            expert_ranks=strategy.expert_parallel,
            virtual=chunks > 1,
        )

    def _held(self, stage: int, slicing: Slicing, lengths: tuple[int, ...]) -> tuple[HeldSlices, ...]:
        """Return what a stage holds at most, of full micro-batches and of the longest document that is kept."""
        num_stages, cluster, cost = len(self.state_bytes), self.cluster, self.cost
        held_by = partial(_held_by, (num_stages, replace(slicing, kept_tokens=0), self.strategy.chunks), stage)
        if slicing.num_slices == 1:  # a micro-batch holds its keys as activations
            return held_by((cluster.tokens_per_rank,), 0.0, LayerBytes(0.0, 0.0, 0.0))
        layer = LayerBytes.of(cost.shape, cost.tensor_parallel, cost.element_bytes)
        if stage == num_stages - 1:
            is_chunked = self.strategy.loss_tokens is not None
            sizes = cost.shape, cost.tensor_parallel, cost.element_bytes
            layer = replace(layer, head=head_bytes(*sizes, is_chunked, self.operators))
        tokens = tuple(cluster.tokens_per_rank * length / sum(lengths) for length in lengths)
        others = min(slicing.kept_tokens, self.context) * (1 - 1 / cluster.num_ranks)
        return held_by(tokens, others, layer)


@dataclass(frozen=True)
class PricedSlices:
    """Chooses the slices of a step under the policy; calling it is pure.

    Attributes:
        stages: the stages.
        cost: slices of a micro-batch are equal in this cost.
    """

    stages: PricedStages
    cost: CostModel

    @property
    def fits(self) -> bool:
        """Whether the policy fits in some slices. Whole micro-batches are tried first, as they are soon worked out."""
        whole, *sliced = self._slicings
        return next(iter(self._fitting((whole, *reversed(sliced)))), None) is not None

    @cached_property
    def found(self) -> tuple[UnderPolicy, ...]:
        """The slicings in which the policy fits on every stage."""
        return tuple(self._fitting(self._slicings))

    def of(self, slicing: Slicing) -> UnderPolicy:
        """Return what the policy makes of the stages in a slicing that was chosen."""
        return next(one for one in self.found if one.slicing == slicing)

    def __call__(self, problem: Problem, place: Place) -> tuple[Slicing, PlacedRanks]:
        """Return the slices of a step and its placement; see ``PolicyChoice``."""
        return self._choice(problem, place)

    @cached_property
    def _choice(self) -> PolicyChoice:
        return PolicyChoice(tuple(PolicyOption(one.slicing, one.slowest) for one in self.found))

    @property
    def _slicings(self) -> list[Slicing]:
        return policy_slicings(OPTIONS, self.stages.context)

    def _fitting(self, slicings: Iterable[Slicing]) -> Iterable[UnderPolicy]:
        stages, context = self.stages, self.stages.context
        width = -(-context // stages.cluster.tokens_per_rank)
        for slicing in slicings:
            rule = SliceRule(slicing, self.cost, stages.strategy.tensor_parallel)
            found = stages.under_policy(slicing, rule.sequence_slices(context, width))
            if found is not None:
                yield found


@lru_cache(maxsize=4096)
def _held_by(
    order: tuple[int, Slicing, int], stage: int, lengths: tuple[float, ...], kept_tokens: float, layer: LayerBytes
) -> tuple[HeldSlices, ...]:
    """Return ``held_slices`` of a ``_schedule``, once for strategies that differ in what it does not depend on."""
    return held_slices(_schedule(*order), stage, lengths, kept_tokens, layer)


@lru_cache(maxsize=64)
def _schedule(num_stages: int, slicing: Slicing, num_chunks: int) -> SliceSchedule:
    """Return what the stages run; it does not depend on the keys that are kept."""
    return seq1f1b_schedule(num_stages, MANY_GROUPS * num_stages, slicing, num_chunks)
