"""A strategy on a task: what it costs, what it needs, and the figures of a step that the real planner plans for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from bytescale_ext.plan.activation.load import LayerSettings
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.slicing_choice import SlicingChoice, full_micro_batches
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import auto_balance
from bytescale_ext.plan.memory.held import held
from bytescale_ext.plan.memory.model_states import expert_parameters, stage_parameters
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.search.costs import strategy_cost
from bytescale_ext.plan.search.experts import coupling
from bytescale_ext.plan.search.layers import block_bytes, computed_again, tokens_in_flight
from bytescale_ext.plan.search.policy import PricedSlices, PricedStages
from bytescale_ext.plan.search.strategy import BLOCK, FULL, KEEP, PRICED, Strategy
from bytescale_ext.plan.search.task import Task, Unfit, cluster_of
from bytescale_ext.plan.search.update import Parameters, Update, end_passes, message_seconds, update_of
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step, in seconds: it takes the sum of the first four.

    Attributes:
        compute: mean of all devices.
        exposed: exchange of keys that nothing hides, mean of all devices.
        idle: waiting for rings and pipeline stages, mean of all devices.
        update: gradients, parameters and optimizer, where nothing hides them.
        device_bytes: the most memory of a device.
        host_bytes: the most host memory of a process.
    """

    compute: float
    exposed: float
    idle: float
    update: float
    device_bytes: float
    host_bytes: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.compute + self.exposed + self.idle + self.update


@dataclass(frozen=True)
class Case:
    """A strategy that fits a task.

    Attributes:
        strategy: what was chosen.
        cluster: its HDP ranks.
        stages: cost of each virtual stage, chunk by chunk.
        memory: of the pipeline stages.
        full_bytes: the most memory of a device and of a process's host memory, where it does not depend on the step.
            Where the planner chooses slices, ``stages`` and this are those of layers that keep all.
        update: of the process with most parameters.
        message: seconds of a message between stages with all tokens of a micro-batch, without ``latency``.
        latency: seconds of one of a few bytes.
        planner: plans its steps.
        keeps_all: layers keep all activations until their backward pass, if micro-batches run whole.
    """

    strategy: Strategy
    cluster: Cluster
    stages: tuple[StageCost, ...]
    memory: StageMemory
    full_bytes: tuple[float, float]
    update: Update
    message: float
    latency: float
    planner: HdpPlanner
    keeps_all: bool

    @classmethod
    def of(cls, task: Task, strategy: Strategy) -> Case:
        """Return the case of a strategy. Raises Unfit where ranks, documents or memory do not suffice."""
        cluster = cluster_of(task, strategy)
        cost = strategy_cost(task.cost, strategy, cluster, task.operators)
        memory, keeps_all = memory_of(cost, strategy, cluster, task.operators), strategy.activations == KEEP
        if strategy.activations == PRICED and not strategy.chooses_slices:
            whole = _priced(task, strategy, cost, memory).under_policy()
            if whole is None:
                raise Unfit("device memory")
            physical, virtual = list(whole.stages), list(whole.virtual)
            full_bytes, keeps_all = (whole.device_bytes, whole.host_bytes), whole.keeps_all
        elif strategy.activations == BLOCK:
            numbers = [min(layers, strategy.recomputed_layers) for layers in strategy.stage_layers]
            kept = _stages(task, cost, strategy.stage_layers)
            physical = [computed_again(stage, cost, number) for stage, number in zip(kept, numbers, strict=True)]
            virtual, full_bytes = physical, (block_bytes(cost, memory, strategy), 0.0)
        else:
            physical = _stages(task, cost, strategy.stage_layers)
            virtual = _stages(task, cost, [n // strategy.chunks for n in strategy.stage_layers] * strategy.chunks)
            full_bytes = (_full_bytes(strategy, memory, physical[-1]), 0.0)
        nodes, num_stages = cost.nodes(cluster), strategy.num_stages
        slowest = max(physical, key=lambda stage: stage.both.sequence_cost(strategy.tokens_per_rank, 1)).on(nodes)
        choice = _choice(task, strategy, cost, memory, slowest) if strategy.chooses_slices else None
        if choice is None and full_bytes[0] > task.devices.memory_bytes:
            raise Unfit("device memory", full_bytes[0])
        planner = HdpPlanner(
            cluster,
            (slowest,) * num_stages,
            tokens_multiple=task.rows_multiple * strategy.tensor_parallel,
            balance=auto_balance(num_stages > 1 or strategy.expert_parallel > 1),
            aligned=strategy.expert_parallel > 1,
            choice=choice,
        )
        most = max(parameters_of(cost, strategy), key=lambda parameters: parameters.count)
        is_between_nodes = task.devices.count > task.devices.per_node
        return cls(
            strategy,
            cluster,
            tuple(stage.on(nodes) for stage in virtual),
            memory,
            full_bytes,
            update_of(cost, most, cluster, strategy.shares_optimizer),
            message_seconds(cost, strategy.tokens_per_rank, is_between_nodes) if num_stages > 1 else 0.0,
            cost.latency if num_stages > 1 else 0.0,
            planner,
            keeps_all,
        )

    @property
    def priced_slices(self) -> PricedSlices | None:
        """What chooses the slices of a step under the policy ``priced``; None without slices or policy."""
        choice = self.planner.choice
        return choice if isinstance(choice, PricedSlices) else None

    def keeps_all_in(self, slicing: Slicing) -> bool:
        """Return whether layers keep all activations until their backward pass, in micro-batches sliced like this."""
        return self.keeps_all if self.priced_slices is None else self.priced_slices.of(slicing).keeps_all

    @property
    def bounding_stages(self) -> list[tuple[StageCost, ...]]:
        """Stages from which lower bounds of a step follow; the least of these bounds holds.

        Under the policy ``priced`` with slices there is one for each cost that the slowest stage may have. Otherwise
        there is one bound: of the slowest stage where micro-batches run in slices or chunks, else of all stages.
        """
        if self.priced_slices is not None:
            nodes = self.planner.stages[0].forward.nodes
            return [(stage.on(nodes),) for stage in dict.fromkeys(one.slowest for one in self.priced_slices.found)]
        is_plain = not self.strategy.chooses_slices and self.strategy.chunks == 1
        return [self.stages if is_plain else self.planner.stages[:1]]

    def least_seconds(self, work: Sequence[tuple[float, float]]) -> float:
        """Return a time that the mean of steps does not undercut: the slowest stage's own work, evenly on all ranks.

        ``work``: tokens, and the sum of the squares of the lengths, of each step.
        """
        seconds = sum(self.planner.stages[0].both.work(*step) for step in work)
        return seconds / len(work) / self.cluster.num_ranks + self.update.optimizer

    def bound(self, lengths: Sequence[int]) -> float:
        """Return a time that no plan of these documents undercuts: of the step, and of the optimizer."""
        bounds = (lower_bounds(lengths, self.cluster, stages).largest for stages in self.bounding_stages)
        return min(bounds) + self.update.optimizer

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Return the plan of these documents by the planner of training."""
        return _planned(self.planner, tuple(lengths))

    def run(self, lengths: Sequence[int]) -> StepFigures:
        """Return the figures of a step of these documents: planned by the planner of training, and replayed."""
        strategy = self.strategy
        table, slicing = self._planned_table(lengths)
        message = self.latency + self.message / slicing.num_slices
        stages, (device_bytes, host_bytes) = self.stages, self.full_bytes
        if self.priced_slices is not None:
            chosen, nodes = self.priced_slices.of(slicing), self.planner.stages[0].forward.nodes
            stages = tuple(stage.on(nodes) for stage in chosen.stages)
            device_bytes, host_bytes = chosen.device_bytes, chosen.host_bytes
        result = replay_stages(table, stages, slicing, strategy.chunks, p2p_seconds=message)
        if strategy.chooses_slices and self.priced_slices is None:
            most = held(table, slicing, self.planner.stages[0].both, self.memory)
            device_bytes, host_bytes = most.device_bytes(self.memory), most.host_bytes(self.memory)
        exposed, idle = (share * result.makespan for share in (result.exposed_share, result.idle_share))
        in_slots = (coupling(result, slicing.num_slices, strategy.expert_parallel) - 1.0) * result.makespan
        return StepFigures(
            compute=result.makespan - exposed - idle,
            exposed=exposed,
            idle=idle + in_slots,
            update=self.update.exposed(*end_passes(result, slicing.num_slices)),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    def step_bytes(self, lengths: Sequence[int]) -> float:
        """Return the most bytes of a device in a step of these documents, whose micro-batches need not be full.

        Where a policy moves activations, or only some layers are computed again, micro-batches count as full.
        """
        table, slicing = self._planned_table(lengths)
        activations = self.strategy.activations
        if activations == BLOCK or (activations == PRICED and not self.keeps_all_in(slicing)):
            return self.run(lengths).device_bytes
        most = held(table, slicing, self.planner.stages[0].both, self.memory, self.strategy.chunks)
        return most.device_bytes(self.memory)

    def _planned_table(self, lengths: Sequence[int]) -> tuple[ShardTable, Slicing]:
        """Return the shards of the plan of these documents, on ranks that run whole groups, and its slicing."""
        strategy, plan = self.strategy, self.plan(lengths)
        group = strategy.num_stages if strategy.chunks > 1 else 1
        counts = micro_batch_counts(plan, strategy.expert_parallel, group)
        return ShardTable.of(plan).with_counts(np.array(counts)), plan.slicing or ONE_SLICE


@lru_cache(maxsize=64)
def _planned(planner: HdpPlanner, lengths: tuple[int, ...]) -> StepPlan:
    """Plan once for strategies that differ in what the planner does not see, as the optimizer or memory to spare."""
    return planner(lengths)


def memory_of(cost: ModelCost, strategy: Strategy, cluster: Cluster, operators: LayerOperators = FUSED) -> StageMemory:
    """Return the memory of the stages, with the optimizer shared by HDP ranks or whole; ``cost``: of the strategy.

    Under ``BLOCK`` all layers count as if they kept their activations. ``operators``: how those of a layer are built.
    """
    element = cost.element_bytes
    how = LayerSettings(
        element_bytes=element, sequence_parallel=True, operators=operators, loss_tokens=strategy.loss_tokens
    )
    memory = StageMemory.of(cost, strategy.stage_layers, cluster, how)
    if strategy.chunks > 1:
        memory = memory.with_virtual_stages()
    if strategy.activations == FULL:
        memory = memory.recomputing(cost.recompute_bytes, strategy.chooses_slices)
    sharing = element, cluster.num_ranks, strategy.shares_optimizer
    return replace(memory, state_bytes=tuple(each.state_bytes(*sharing) for each in parameters_of(cost, strategy)))


def parameters_of(cost: ModelCost, strategy: Strategy) -> list[Parameters]:
    """Return the parameters of a process of each stage."""
    last, tensor, experts = strategy.num_stages - 1, strategy.tensor_parallel, strategy.expert_parallel
    shapes = [cost.shape.part(layers) for layers in strategy.stage_layers]
    return [
        Parameters(
            stage_parameters(shape, tensor, number == 0, number == last),
            expert_parameters(shape, tensor, experts),
            experts,
        )
        for number, shape in enumerate(shapes)
    ]


def _stages(task: Task, cost: ModelCost, stage_layers: Sequence[int]) -> list[StageCost]:
    last, link = len(stage_layers) - 1, task.devices.link_bytes_per_second
    return [cost.stage(layers, number == last, link) for number, layers in enumerate(stage_layers)]


def _full_bytes(strategy: Strategy, memory: StageMemory, stage: StageCost) -> float:
    """Return the most bytes of a device whose micro-batches are full and run whole."""
    if strategy.chunks == 1:
        in_flight = enumerate(tokens_in_flight(strategy))
        return memory.most_bytes([tokens * memory.token_bytes(number) for number, tokens in in_flight])
    table = full_micro_batches(4 * strategy.num_stages, strategy.tokens_per_rank)
    return held(table, ONE_SLICE, stage.both, memory, strategy.chunks).device_bytes(memory)


def _choice(
    task: Task, strategy: Strategy, cost: ModelCost, memory: StageMemory, slowest: StageCost
) -> SlicingChoice | PricedSlices:
    """Return what chooses the slices of each step, as training does. Raises Unfit where no slices fit."""
    if strategy.activations == PRICED:
        priced = PricedSlices(_priced(task, strategy, cost, memory), slowest.both)
        if not priced.fits:
            raise Unfit("device memory")
        return priced
    assert strategy.device_gb is not None, strategy
    choice = SlicingChoice.within(memory.without_states(), strategy.device_gb * 1e9, strategy.host_gb * 1e9)
    try:
        choice.check_fits(slowest.both, strategy.tokens_per_rank)
    except ValueError:
        raise Unfit("device memory") from None
    return choice


def _priced(task: Task, strategy: Strategy, cost: ModelCost, memory: StageMemory) -> PricedStages:
    cluster, link = cluster_of(task, strategy), task.devices.link_bytes_per_second
    return PricedStages(strategy, cost, cluster, memory.state_bytes, task.context, link, task.operators)
