"""Cost of a strategy on a task: its setup, and the figures of steps that training's planner plans for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.slicing_choice import SlicingChoice
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.search.costs import strategy_cost
from bytescale_ext.plan.search.strategy import BLOCK, FULL, PRICED, Strategy
from bytescale_ext.plan.search.task import DoesNotFit, Task, cluster_of
from bytescale_ext.plan.setup.choose import check_fits, decide
from bytescale_ext.plan.setup.costs import with_expert_exchange
from bytescale_ext.plan.setup.forecast import Forecast, StepTime
from bytescale_ext.plan.setup.planner import planner_of
from bytescale_ext.plan.setup.policy import PolicySlices
from bytescale_ext.plan.setup.setup import (
    AUTO,
    NO_RECOMPUTE,
    Budget,
    Mesh,
    Numerics,
    Policy,
    Sequences,
    Setup,
    States,
)
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Predicted time and memory of one step.

    Attributes:
        time: parts of the step's time.
        device_bytes: peak memory of the fullest device.
        host_bytes: peak host memory of a process.
    """

    time: StepTime
    device_bytes: float
    host_bytes: float

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.time.seconds


@dataclass(frozen=True)
class CostedStrategy:
    """A strategy that fits a task.

    Attributes:
        strategy: strategy that fits.
        forecast: forecast of its steps.
        planner: planner of its steps, as in training.
    """

    strategy: Strategy
    forecast: Forecast
    planner: HdpPlanner

    @classmethod
    def of(cls, task: Task, strategy: Strategy) -> CostedStrategy:
        """Return a strategy with its forecast. Raises Unfit if ranks, documents or memory do not suffice."""
        decision = decide(setup_of_strategy(task, strategy))
        forecast, slices = Forecast(decision), decision.slices
        if isinstance(slices, SlicingChoice):
            try:
                check_fits(decision)
            except ValueError:
                raise DoesNotFit("device memory") from None
        elif isinstance(slices, PolicySlices):
            if not slices.fits:
                raise DoesNotFit("device memory")
        elif strategy.activations == PRICED:
            if forecast.whole is None:
                raise DoesNotFit("device memory")
        elif forecast.full_bytes[0] > task.devices.memory_bytes:
            raise DoesNotFit("device memory", forecast.full_bytes[0])
        return cls(strategy, forecast, planner_of(decision))

    @property
    def full_bytes(self) -> tuple[float, float]:
        """Peak memory of a device and peak host memory of a process, with full micro-batches without slices."""
        return self.forecast.full_bytes

    @property
    def bounding_stages(self) -> list[tuple[StageCost, ...]]:
        """Stage costs for lower bounds of a step. The smallest of the bounds holds.

        Under the policy ``priced`` with slices there is a bound for each cost that the slowest stage may have.
        Otherwise there is a single bound: of the slowest stage if micro-batches run in slices or chunks, else of all
        stages.
        """
        setup, slices = self.forecast.setup, self.forecast.decision.slices
        if isinstance(slices, PolicySlices):
            nodes = setup.cost.nodes(setup.cluster)
            return [(stage.on(nodes),) for stage in dict.fromkeys(option.slowest for option in slices.fitting)]
        is_plain = not setup.chooses_slices and setup.mesh.virtual_stages == 1
        return [self.forecast.stages(ONE_SLICE) if is_plain else self.planner.stages[:1]]

    def least_seconds(self, work: Sequence[tuple[float, float]]) -> float:
        """Return a lower bound of the mean time of steps: the slowest stage's own work, by the speeds of all ranks.

        ``work``: tokens, and the sum of the squares of the lengths, of each step.
        """
        seconds = sum(self.planner.stages[0].both.work(*step) for step in work)
        all_speeds = float(self.forecast.setup.cluster.rank_speeds().sum())
        return seconds / len(work) / all_speeds + self.forecast.optimizer_seconds

    def bound(self, lengths: Sequence[int]) -> float:
        """Return a lower bound of the time of a step of these documents, including the optimizer."""
        cluster = self.forecast.setup.cluster
        bounds = (lower_bounds(lengths, cluster, stages).largest for stages in self.bounding_stages)
        return min(bounds) + self.forecast.optimizer_seconds

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Return the plan of these documents by the planner of training."""
        return _planned(self.planner, tuple(lengths))

    def run(self, lengths: Sequence[int]) -> StepFigures:
        """Return the figures of a step of these documents, planned by the planner of training and replayed.

        Memory counts full micro-batches, except if the planner chooses slices.
        """
        table, slicing = self.forecast.table(self.plan(lengths))
        device_bytes, host_bytes = self.full_bytes
        if self.strategy.chooses_slices:
            policy = self.forecast.under_policy(slicing)
            stages = self.forecast.memory(table, slicing)
            device_bytes = max(stage.device.total for stage in stages) if policy is None else policy.device_bytes
            host_bytes = max(stage.host for stage in stages) if policy is None else policy.host_bytes
        return StepFigures(self.forecast.time(table, slicing), device_bytes, host_bytes)

    def step_bytes(self, lengths: Sequence[int]) -> float:
        """Return the peak bytes of a device in a step of these documents. Micro-batches need not be full."""
        return max(stage.device.total for stage in self.forecast.memory(*self.forecast.table(self.plan(lengths))))


@lru_cache(maxsize=64)
def _planned(planner: HdpPlanner, lengths: tuple[int, ...]) -> StepPlan:
    """Return a plan.

    Cached for strategies that differ only in settings that the planner ignores, such as the optimizer.
    """
    return planner(lengths)


def setup_of_strategy(task: Task, strategy: Strategy) -> Setup:
    """Return the setup of a strategy. Raises Unfit if its ranks do not divide what they share, or are too few."""
    cluster = cluster_of(task, strategy)
    cost = strategy_cost(task.cost, strategy, task.operators)
    devices, tensor_parallel = task.devices, strategy.tensor_parallel
    mesh = Mesh(
        strategy.stage_layers,
        tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        virtual_stages=strategy.chunks,
        expert_parallel=strategy.expert_parallel,
        shares_optimizer=strategy.shares_optimizer,
        devices_per_node=devices.per_node,
    )
    numerics = Numerics(
        cost.element_bytes,
        task.operators,
        strategy.loss_tokens,
        task.rows_multiple,
        recompute={FULL: "full", BLOCK: "block"}.get(strategy.activations, NO_RECOMPUTE),
        recomputed_layers=strategy.recomputed_layers,
    )
    return Setup(
        shape=cost.shape,
        mesh=mesh,
        numerics=numerics,
        cluster=cluster,
        cost=with_expert_exchange(cost, mesh, cluster, numerics.recompute),
        sequences=Sequences(task.context),
        budget=Budget(
            devices.memory_bytes if strategy.device_gb is None else strategy.device_gb * 1e9,
            strategy.host_gb * 1e9,
            link_bytes_per_second=devices.link_bytes_per_second,
        ),
        slicing=AUTO if strategy.chooses_slices else ONE_SLICE,
        policy=Policy(PRICED if strategy.activations == PRICED else "none"),
        states=States(ties_embeddings=task.ties_embeddings, sizes=task.state_sizes),
    )
