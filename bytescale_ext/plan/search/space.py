"""Strategies of a task, as a tree: tensor parallelism, stages, C and experts, then all other choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from bytescale_ext.plan.search.balance import balanced_layers
from bytescale_ext.plan.search.costed import setup_of_strategy
from bytescale_ext.plan.search.strategy import ACTIVATIONS, BLOCK, FULL, KEEP, PRICED, Strategy
from bytescale_ext.plan.search.task import DoesNotFit, Task, cluster_of
from bytescale_ext.plan.setup.forecast import block_bytes, tokens_in_flight
from bytescale_ext.plan.setup.memory import (
    Parameters,
    parameters,
    stage_memory,
    stage_state_bytes,
    stage_update_bytes,
)
from bytescale_ext.plan.setup.setup import Setup
from bytescale_ext.plan.setup.update import update_of

LOSS_TOKENS: Final = 4096
"""Tokens of a chunk of the loss."""

FEWEST_TOKENS: Final = 1024
"""Smallest C that is tried, unless the context fits on the ranks with less."""

MOST_CHUNKS: Final = 4
"""Largest number of virtual stages of a stage that is tried."""


@dataclass(frozen=True)
class Branch:
    """Strategies with equal tensor parallelism, number of stages, C and expert parallelism.

    Galvatron (Miao et al. 2022, section 3.2) divides its search by tensor parallelism and stages before it chooses for
    layers. A branch also has a single C. It stays closed while its bound is above the times of known strategies
    (``explore.py``).

    Attributes:
        mesh: common choices, as a strategy that keeps all activations.
        strategies: iterator that builds the strategies.
    """

    mesh: Strategy
    strategies: Iterable[Strategy]

    def least_seconds(self, task: Task, work: Sequence[tuple[float, float]]) -> float:
        """Return a lower bound of the mean time of steps with any of the strategies.

        It counts the work of the slowest stage for the best distribution of layers, by the speeds of all ranks, and the
        optimizer for a mean stage's parameters, shared by all ranks.

        Args:
            task: task with its devices.
            work: tokens, and the sum of the squares of the lengths, of each step.
        """
        setup = setup_of_strategy(task, self.mesh)
        cost, cluster, mesh = setup.cost, setup.cluster, setup.mesh
        layer, head = (sum(stage.both.work(*step) for step in work) for stage in (cost.stage(1), cost.stage(0, True)))
        slowest = slowest_stage_seconds(cost.shape.num_layers, mesh.num_stages, layer, head)
        (whole,) = parameters(replace(setup, mesh=replace(mesh, stage_layers=(cost.shape.num_layers,))))
        shared = Parameters(whole.count / mesh.num_stages, num_ranks=cluster.num_ranks)
        update = update_of(cost, shared, cluster, True, setup.states.sizes)
        return slowest / len(work) / float(cluster.rank_speeds().sum()) + update.optimizer


@dataclass(frozen=True, slots=True)
class Space:
    """Values that are tried. Fields restrict the values that the task allows.

    Attributes:
        tensor_parallel: sizes; empty: every power of two that divides heads and groups and fits in a node.
        stages: numbers of stages; empty: every divisor of the number of devices.
        tokens_per_rank: values of C; empty: powers of two, from the smallest on which the context fits to the context.
        activations: see ``ACTIVATIONS``.
        pipelines: ways to run micro-batches, from ("whole", "slices", "virtual").
        uneven: whether stages of unequal layers are tried too.
        expert_parallel: sizes; empty: every divisor of the experts of a layer and of the HDP ranks.
        allows: function that returns whether training supports a strategy.
    """

    tensor_parallel: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    tokens_per_rank: tuple[int, ...] = ()
    activations: tuple[str, ...] = ACTIVATIONS
    pipelines: tuple[str, ...] = ("whole", "slices", "virtual")
    uneven: bool = True
    expert_parallel: tuple[int, ...] = ()
    allows: Callable[[Strategy], bool] = lambda strategy: True

    def strategies(self, task: Task) -> Iterator[Strategy]:
        """Yield each strategy with fitting ranks, documents and context, without a check of memory."""
        for branch in self.branches(task):
            yield from branch.strategies

    def branches(self, task: Task) -> Iterator[Branch]:
        """Yield the strategies in branches with common choices."""
        for layout, num_ranks in self._meshes(task):
            for tokens in self.tokens_per_rank or capacities(
                task, num_ranks, layout.tensor_parallel * task.rows_multiple
            ):
                if tokens * num_ranks < task.context:
                    continue
                for experts in self.expert_parallel or expert_sizes(task, num_ranks):
                    mesh = replace(layout, tokens_per_rank=tokens, expert_parallel=experts)
                    yield Branch(mesh, self._of_mesh(task, mesh))

    def _meshes(self, task: Task) -> Iterator[tuple[Strategy, int]]:
        """Yield tensor parallelism and stages, as a strategy with the largest C, and the number of HDP ranks."""
        sizes = product(
            self.tensor_parallel or tensor_sizes(task), self.stages or range(1, task.cost.shape.num_layers + 1)
        )
        for tensor_parallel, stages in sizes:
            strategy = Strategy(tensor_parallel, (1,) * stages, task.context)
            try:
                num_ranks = cluster_of(task, strategy).num_ranks
            except DoesNotFit:
                continue
            yield strategy, num_ranks

    def _of_mesh(self, task: Task, mesh: Strategy) -> Iterator[Strategy]:
        """Yield the strategies with this tensor parallelism, number of stages and C."""
        losses = (None, LOSS_TOKENS) if mesh.tokens_per_rank > LOSS_TOKENS else (None,)
        for activations, loss_tokens, shares_optimizer in product(self.activations, losses, (True, False)):
            strategy = replace(mesh, loss_tokens=loss_tokens, shares_optimizer=shares_optimizer)
            strategy = replace(strategy, activations=FULL if activations == BLOCK else activations)
            for layers in self._layers(task, strategy):
                of_layers = replace(strategy, stage_layers=layers)
                strategies = blocks(task, of_layers) if activations == BLOCK else self._of_layers(task, of_layers)
                yield from filter(self.allows, strategies)

    def _layers(self, task: Task, strategy: Strategy) -> list[tuple[int, ...]]:
        """Return equal stages, if they exist, and stages balanced within the memory, if they differ."""
        num_layers, num_stages = task.cost.shape.num_layers, strategy.num_stages
        equal = [] if num_layers % num_stages else [(num_layers // num_stages,) * num_stages]
        balanced = balanced_stages(task, strategy) if self.uneven and num_stages > 1 else None
        return [*equal, *([balanced] if balanced is not None and balanced not in equal else [])]

    def _of_layers(self, task: Task, strategy: Strategy) -> Iterator[Strategy]:
        """Yield the strategy with each way to run micro-batches."""
        layers, num_stages = strategy.stage_layers, strategy.num_stages
        if "whole" in self.pipelines or num_stages == 1:
            yield with_budgets(task, strategy)
        if num_stages == 1:
            return
        if "slices" in self.pipelines:
            yield with_budgets(task, replace(strategy, chooses_slices=True))
        if "virtual" in self.pipelines and len(set(layers)) == 1:
            for chunks in range(2, MOST_CHUNKS + 1):
                if not layers[0] % chunks:
                    yield with_budgets(task, replace(strategy, chunks=chunks))


def blocks(task: Task, strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategy with as few recomputed layers as possible, if these are some but not all layers."""
    kept = replace(strategy, activations=KEEP)
    number = fewest_recomputed(setup_of_strategy(task, kept))
    if number is not None and 0 < number < max(kept.stage_layers):
        yield replace(kept, activations=BLOCK, recomputed_layers=number)


def fewest_recomputed(setup: Setup) -> int | None:
    """Return the smallest number of recomputed layers of each stage with which full micro-batches fit, or None.

    Megatron recomputes equally many layers on all stages, so the stage with the largest need decides.

    Args:
        setup: setup without recomputation and slices.
    """
    counts = np.arange(max(setup.mesh.stage_layers) + 1)
    states, update = (
        np.array(of_stages)[:, None] for of_stages in (stage_state_bytes(setup), stage_update_bytes(setup))
    )
    fits = np.all(states + np.maximum(update, block_bytes(setup, counts)) <= setup.budget.device_bytes, axis=0)
    return int(counts[fits][0]) if fits.any() else None


def tensor_sizes(task: Task) -> list[int]:
    """Return the powers of two that fit in a node and divide query heads, key-value heads and devices."""
    shape, devices = task.cost.shape, task.devices
    common = math.gcd(shape.num_heads, shape.num_kv_heads, devices.count)
    return [1 << power for power in range(16) if not common % (1 << power) and 1 << power <= devices.per_node]


def expert_sizes(task: Task, num_ranks: int) -> list[int]:
    """Return the numbers of HDP ranks that may share the experts of a layer; only 1 without experts."""
    common = math.gcd(task.cost.shape.num_experts, num_ranks) if task.cost.shape.num_experts else 1
    return [size for size in range(1, common + 1) if not common % size]


def capacities(task: Task, num_ranks: int, multiple: int) -> list[int]:
    """Return values of C: the smallest with which the context fits on the ranks, and larger powers of two.

    They are multiples of ``multiple`` tokens, and at most the context.
    """
    smallest = -(-task.context // num_ranks)
    smallest = max(-(-smallest // multiple) * multiple, min(FEWEST_TOKENS, task.context))
    greater = (1 << power for power in range(smallest.bit_length(), task.context.bit_length() + 1))
    return [smallest, *(tokens for tokens in greater if smallest < tokens <= task.context)]


def with_budgets(task: Task, strategy: Strategy) -> Strategy:
    """Return a strategy with the memory of a device and the host memory, if its flags need them."""
    if not (strategy.chooses_slices or strategy.activations == PRICED):
        return strategy
    host_gb = math.floor(task.devices.host_bytes / 1e6) / 1e3
    return replace(strategy, device_gb=task.devices.memory_bytes / 1e9, host_gb=host_gb)


def balanced_stages(task: Task, strategy: Strategy) -> tuple[int, ...] | None:
    """Return the layers of stages that minimize the time of the slowest stage within the memory, or None.

    Stages are timed on the documents of all steps, each on one rank. Under the policy ``priced``, only the input
    of a layer counts as memory, as with full recompute.
    """
    num_stages, num_layers = strategy.num_stages, task.cost.shape.num_layers
    if strategy.activations == PRICED:
        strategy = replace(strategy, activations=FULL)
    most_layers = [0] * num_stages
    setups = [setup_of_strategy(task, replace(strategy, stage_layers=(count,) * num_stages)) for count in (1, 2)]
    one_layer, two_layers = (stage_memory(setup) for setup in setups)
    cost = setups[0].cost
    lengths = np.array([length for step in task.steps for length in step], dtype=np.float64)
    layer = float(cost.stage(1).both.sequence_cost(lengths, np.ones_like(lengths)).sum())
    head = float((cost.head_forward + cost.head_backward) * lengths.sum())
    for stage, tokens in enumerate(tokens_in_flight(setups[0])):
        each = two_layers.state_bytes[stage] - one_layer.state_bytes[stage] + tokens * one_layer.layer.activations
        fixed = 2 * one_layer.state_bytes[stage] - two_layers.state_bytes[stage] + tokens * one_layer.layer.angles
        left = task.devices.memory_bytes - fixed
        most = max(0, math.floor((left - one_layer.working_bytes[stage]) / each))
        most_layers[stage] = min(most, num_layers - num_stages + 1)

    def seconds(stage: int, count: int) -> float:
        return count * layer + head * (stage == num_stages - 1)

    layers = balanced_layers(num_layers, num_stages, seconds, most_layers)
    return None if layers is None else tuple(layers)


def slowest_stage_seconds(num_layers: int, num_stages: int, layer: float, head: float) -> float:
    """Return the least time of the slowest stage; the last stage takes ``head`` in addition to its layers."""
    if num_stages == 1:
        return num_layers * layer + head
    of_last = range(1, num_layers - num_stages + 2)
    return min(max(-(-(num_layers - last) // (num_stages - 1)) * layer, last * layer + head) for last in of_last)
