from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.learned import UNLEARNED, LearnedCosts
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.replay import StageReplay, replay_stages
from bytescale_ext.plan.evaluate.slicing_choice import full_micro_batches
from bytescale_ext.plan.search.costed import CostedStrategy
from bytescale_ext.plan.search.strategy import BLOCK, FULL, KEEP, Strategy
from bytescale_ext.plan.setup.forecast import Forecast, coupling
from bytescale_ext.plan.setup.messages import message_seconds
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from tests.plan.search.tasks import COST, small_task
from tests.plan.simple_plans import plan_naive

TASK = small_task()
LAYERS = 3
LENGTHS = (1024,) * 48


def forecasts(slicing: Slicing, chunks: int, activations: str, recomputed_layers: int = 0) -> tuple[float, float]:
    """Return the seconds of computation and the bytes of the fullest device in a step of documents in rings."""
    words = {"activations": activations, "recomputed_layers": recomputed_layers, "chunks": chunks}
    strategy = CostedStrategy.of(TASK, Strategy(1, (LAYERS, LAYERS), 1024, shares_optimizer=True, **words))
    table, _ = strategy.forecast.table(strategy.plan(LENGTHS))
    stages = strategy.forecast.memory(table, slicing)
    return strategy.forecast.time(table, slicing).compute, max(stage.device.total for stage in stages)


def replayed(num_stages: int, *ranks: list[float]) -> StageReplay:
    """Return a replay with slots of these seconds on each rank, equally long on all stages and in both passes."""
    seconds = np.repeat(np.array([slot / 2 for rank in ranks for slot in rank]), 2 * num_stages)
    stops = seconds.reshape(-1, 2, num_stages)
    counts = np.array([len(rank) for rank in ranks])
    return StageReplay(num_stages, counts, np.zeros_like(stops), stops, stops, np.zeros_like(stops))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_slot_takes_as_long_as_its_slowest_rank(num_stages: int) -> None:
    uneven = replayed(num_stages, [3.0, 1.0], [1.0, 3.0], [2.0], [2.0])
    assert coupling(uneven, 1, 2) == pytest.approx(6.0 / 4.0)
    assert coupling(uneven, 1, 1) == 1.0
    even = replayed(num_stages, [3.0, 1.0], [3.0, 1.0])
    assert coupling(even, 1, 2) == 1.0


@pytest.mark.parametrize(("nodes", "leaving"), [(1, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("tokens", [100, 1000])
def test_messages_between_stages_take_the_time_of_their_tokens(tokens: int, nodes: int, leaving: int) -> None:
    """One micro-batch goes through four stages, and its gradient comes back; ``leaving`` messages leave a node."""
    devices = replace(TASK.devices, per_node=8 // nodes)
    task = replace(TASK, cost=replace(COST, slowdown=8.0), devices=devices, context=2048)
    forecast = CostedStrategy.of(task, Strategy(1, (2, 2, 1, 1), 1024, shares_optimizer=True)).forecast
    table = ShardTable.of(plan_naive([tokens], 2, 1024))
    cost, without = forecast.setup.cost, replay_stages(table, forecast.stages(ONE_SLICE)).makespan
    inside, between = (message_seconds(cost, tokens, is_between) for is_between in (False, True))
    messages = 3 * cost.latency + (3 - leaving) * inside + leaving * between
    assert between == pytest.approx(8 * inside)
    assert forecast.replay(table, ONE_SLICE).makespan == pytest.approx(without + 2 * messages)


@pytest.mark.parametrize(("per_node", "leaving"), [(8, [0, 0, 0]), (4, [1, 1, 1])])
def test_messages_between_chunks_go_from_the_last_stage_to_the_first(per_node: int, leaving: list[int]) -> None:
    task = replace(TASK, cost=replace(COST, slowdown=8.0), devices=replace(TASK.devices, per_node=per_node))
    forecast = CostedStrategy.of(task, Strategy(1, (2, 2), 1024, shares_optimizer=True, chunks=2)).forecast
    table, cost = ShardTable.of(plan_naive([100], 4, 1024)), forecast.setup.cost
    seconds = forecast.message_seconds(table, ONE_SLICE)
    expected = [cost.latency + message_seconds(cost, 100, bool(one)) for one in leaving]
    assert seconds == pytest.approx(np.array([expected]))


def test_slices_are_replayed_on_whole_stages() -> None:
    forecast = CostedStrategy.of(TASK, Strategy(1, (2, 2), 1024, shares_optimizer=True, chunks=2)).forecast
    assert [forecast.num_chunks(Slicing(count)) for count in (1, 2)] == [2, 1]


def test_a_slow_stage_of_a_rank_takes_longer() -> None:
    """The second stages have half the speed, so the passes of the only micro-batch take twice as long there."""
    forecast = CostedStrategy.of(TASK, Strategy(1, (2, 2), 1024, shares_optimizer=True)).forecast
    table = ShardTable.of(plan_naive([1000], 4, 1024))
    slow = LearnedCosts(speeds=(0.5,) * 4, stage_speeds=((1.0,) * 4, (0.5,) * 4))
    before, after = (forecast.replay(table, ONE_SLICE, learned) for learned in (UNLEARNED, slow))
    _, second = (before.stops - before.starts).sum(axis=(0, 1))
    assert after.makespan - before.makespan == pytest.approx(second)


def test_closed_form_of_recomputed_layers_is_the_peak_of_a_plan() -> None:
    for count in range(1, LAYERS + 1):
        blocks = Strategy(1, (LAYERS, LAYERS), 1024, shares_optimizer=True, activations=BLOCK, recomputed_layers=count)
        strategy = CostedStrategy.of(TASK, blocks)
        of_plan = strategy.forecast.memory(full_micro_batches(8, 1024), ONE_SLICE)
        assert strategy.full_bytes[0] == pytest.approx(max(stage.device.total for stage in of_plan))


@pytest.mark.parametrize(("slicing", "chunks"), [(ONE_SLICE, 1), (ONE_SLICE, 3), (Slicing(4), 1)])
def test_recomputed_first_layers_lie_between_none_and_all(slicing: Slicing, chunks: int) -> None:
    of_all, full = (forecasts(slicing, chunks, *way) for way in ((BLOCK, LAYERS // chunks), (FULL,)))
    assert of_all == pytest.approx(full)
    none = forecasts(slicing, chunks, KEEP)
    ways = [none, *(forecasts(slicing, chunks, BLOCK, count) for count in range(1, LAYERS // chunks)), full]
    seconds, held = zip(*ways, strict=True)
    assert list(seconds) == sorted(seconds)
    assert list(held) == sorted(held, reverse=True)
    assert none[0] < full[0]
    assert none[1] > full[1]


def test_passes_on_a_slow_stage_take_longer() -> None:
    forecast = CostedStrategy.of(TASK, Strategy(1, (LAYERS, LAYERS), 1024, shares_optimizer=True)).forecast
    num_ranks = forecast.setup.cluster.num_ranks
    table = ShardTable.of(plan_naive([700] * 2 * num_ranks, num_ranks, 1024))
    speeds = ((1.0,) * num_ranks, (0.5,) * num_ranks)
    slow = LearnedCosts(speeds=(0.5,) * num_ranks, stage_speeds=speeds)
    equal, unequal = (forecast.replay(table, ONE_SLICE, learned) for learned in (UNLEARNED, slow))
    ratios = (unequal.stops - unequal.starts) / (equal.stops - equal.starts)
    assert ratios[..., 0] == pytest.approx(1.0)
    assert ratios[..., 1] == pytest.approx(2.0)


@pytest.mark.parametrize(("layers", "chunks"), [((4, 4), 2), ((3, 3), 1), ((4, 3), 1)])
def test_virtual_stages_of_unlike_layers_are_replayed_as_whole_stages(layers: tuple[int, int], chunks: int) -> None:
    decision = CostedStrategy.of(TASK, Strategy(1, (LAYERS, LAYERS), 1024, shares_optimizer=True)).forecast.decision
    mesh = replace(decision.setup.mesh, stage_layers=layers, virtual_stages=2)
    forecast = Forecast(replace(decision, setup=replace(decision.setup, mesh=mesh)))
    assert forecast.num_chunks(ONE_SLICE) == chunks
    assert forecast.num_chunks(Slicing(2)) == 1
