"""Ranks that share experts sum their counts to loads, and one process writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bytescale_ext.config.experts import PlacementConfig, TraceTo
from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.placement import PlacementPlan
from bytescale_ext.plan.experts.replay import PlacementSettings
from bytescale_ext.plan.experts.trace import TraceHead, read_trace
from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

HEAD = TraceHead(experts=4, topk=1, ranks=2)
LAYERS = (2, 5)


def write_counts(rank: int, world: int, file: str, steps: int) -> dict[int, list[list[int]]]:
    """Count tokens on 2 data-parallel pairs of ranks, each pair with all experts; return the last loads of this rank.

    Rank r chooses expert r for 10 r + 1 tokens in both layers.
    """
    from megatron.core import parallel_state

    from megatron.bytescale.core.transformer.moe.counted_layer import TokenCounts
    from megatron.bytescale.features.experts import loads as experts

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    counts, target = TokenCounts(), TraceTo(Path(file), HEAD)
    for step in range(steps):
        experts.running_step = lambda step=step: step
        chosen = torch.zeros(10 * rank + 1, 4, dtype=torch.bool)
        chosen[:, rank] = True
        for layer in LAYERS:
            counts.note(layer, chosen)
        loads = experts.step_loads(counts)
        experts.record(target, loads)
    assert loads.num_passes == 1
    return {layer: found.tolist() for layer, found in loads.by_layer.items()}


def test_each_pair_has_its_loads_and_the_first_writes(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    ranks = run_ranks(write_counts, 4, str(file), 2)
    first, second = [[1, 0, 0, 0], [0, 11, 0, 0]], [[0, 0, 21, 0], [0, 0, 0, 31]]
    assert ranks == [dict.fromkeys(LAYERS, first)] * 2 + [dict.fromkeys(LAYERS, second)] * 2
    trace = read_trace(file)
    assert trace.head == HEAD
    assert trace.layers == LAYERS
    assert trace.loads.tolist() == [[first] * 2] * 2


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    for _ in range(2):
        run_ranks(write_counts, 2, str(file), 1)
    assert len(read_trace(file).loads) == 2


def no_experts(rank: int, world: int) -> dict[int, object]:
    """A stage of dense layers does not communicate."""
    from megatron.bytescale.core.transformer.moe.counted_layer import TokenCounts
    from megatron.bytescale.features.experts.loads import step_loads

    return dict(step_loads(TokenCounts()).by_layer)


def test_a_stage_without_experts_has_no_loads() -> None:
    assert run_ranks(no_experts, 1) == [{}]


def follow(interval: int, cost: ExpertCost, passes: int = 1) -> list[tuple[int, str, str]]:
    """Follow loads of four steps with expert 0, then 3 popular; return the placement and the text of each step."""
    from megatron.bytescale.core.transformer.moe.placed_layer import Placements
    from megatron.bytescale.features.experts import loads as experts

    config = PlacementConfig(4, 2, PlacementSettings("flexmoe", 3, 1.1, interval, cost))
    placements = Placements(PlacementPlan.static(4, 2, 3))
    follower, lines, found = experts.Follower(config, placements, 2), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "print_rank_last", lines.append)
        patch.setattr(experts, "write_scalars", lambda scalars, step: lines.append(f"{step} {scalars}"))
        for step, popular in enumerate([0, 0, 3, 3]):
            patch.setattr(experts, "running_step", lambda step=step: step)
            loads = np.full((2, 4), 20)
            loads[:, popular] = 200
            follower(experts.StepLoads({7: loads}, passes))
            found.append((placements.of(7).slots[0][2], *(lines[-2:] if step % 2 else ("", ""))))
    return found


FREE = ExpertCost(1e-6, 0.0, 0.0)


def test_plans_follow_the_steps_before() -> None:
    found = follow(1, FREE)
    assert [replica for replica, *_ in found] == [-1, -1, 3, 3]
    line, scalars = found[1][1:]
    assert "have 1.348 times the mean tokens, 1.692 without replicas; 1 new replicas" in line
    assert scalars.startswith("2 {'experts/balance': 1.34")
    assert scalars.endswith("'experts/new replicas': 1}")


def test_longer_intervals_plan_less_often() -> None:
    assert [replica for replica, *_ in follow(2, FREE)] == [-1, -1, -1, 3]


def test_weights_travel_with_each_micro_batch() -> None:
    cost = ExpertCost(1e-6, 0.0, 5e-5)
    assert [replica for replica, *_ in follow(1, cost)] == [-1, -1, 3, 3]
    assert [replica for replica, *_ in follow(1, cost, passes=8)] == [-1] * 4, "eight copies cost more than they gain"


def feed_back(rank: int, world: int) -> list[float]:
    """Run two steps on two pairs of ranks.

    The first pair's layer has a load ratio of 3 to 1, the second pair's is even.
    """
    from megatron.core import parallel_state

    from bytescale_ext.data.loading.loads import LoadHistory
    from megatron.bytescale.core.transformer.moe.placed_layer import Placements
    from megatron.bytescale.features.experts import loads as experts

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    placements = Placements(PlacementPlan.static(4, 2, 3))
    feedback = experts.Feedback(runtime_of(), placements, LoadHistory(lag=1))
    uneven, even = np.array([[30, 0, 10, 0]] * 2), np.array([[5, 5, 5, 5]] * 2)
    for step in (7, 8):
        experts.running_step = lambda step=step: step
        feedback(experts.StepLoads({3: uneven if rank < 2 else even}, 1))
        parts = np.array([[512, 1024, 512, 0], [512, 0, 512, 1024]])
        placements.by_layer[3] = PlacementPlan.of(parts, 4)
    return [feedback.history.at(step) for step in (7, 8, 9)]


def test_the_planner_hears_how_uneven_experts_were_as_placed() -> None:
    """Imbalances are 1.5 and 1 in the first step, with a mean of 1.25, and 1 in the second step."""
    assert run_ranks(feed_back, 4) == [[1.0, 1.25, 1.125]] * 4


def test_stages_without_experts_do_not_count() -> None:
    assert run_ranks(no_layers, 2) == [[1.5, 1]] * 2


def no_layers(rank: int, world: int) -> list[float]:
    """The first rank belongs to a dense stage."""
    from bytescale_ext.data.loading.loads import LoadHistory
    from megatron.bytescale.core.transformer.moe.placed_layer import Placements
    from megatron.bytescale.features.experts import loads as experts

    loads = {3: np.array([[30, 0, 10, 0]] * 2)} if rank else {}
    found: list[float] = []
    for of_step in (loads, {}):  # no rank has tokens in the second step
        experts.running_step = lambda: 0
        feedback = experts.Feedback(runtime_of(), Placements(PlacementPlan.static(4, 2, 3)), LoadHistory(lag=1))
        feedback(experts.StepLoads(of_step, 1))
        found.append(feedback.history.at(1))
    return found
