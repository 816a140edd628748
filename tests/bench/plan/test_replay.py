"""The check of the cost model: its figures by hand, and one tiny run for real of which no time is judged."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from scripts.bench.plan import replay
from tests.harness import run_ranks
from tests.plan.simple_plans import plan_naive

ROOT = Path(__file__).resolve().parents[3]
COST = CostModel(a=1.0, b=10.0, g=100.0)


def shared(seq: int, length: int, ring: tuple[int, ...], rank: int) -> Shard:
    return Shard(seq, zigzag_ranges(length, len(ring), ring.index(rank)), ring)


def test_rows_are_the_classes_of_a_plan_in_an_order_that_all_ranks_share() -> None:
    # rank 0: A; rank 0 and 1: B; rank 1 and 2: C; rank 2: D
    plan = StepPlan(
        num_ranks=3,
        tokens_per_rank=8,
        lengths=(4, 6, 8, 2),
        ranks=(
            (MicroBatch((Shard(0, ((0, 4),), (0,)),)), MicroBatch((shared(1, 6, (0, 1), 0),))),
            (MicroBatch((shared(1, 6, (0, 1), 1),)), MicroBatch((shared(2, 8, (1, 2), 1),))),
            (MicroBatch((shared(2, 8, (1, 2), 2),)), MicroBatch((Shard(3, ((0, 2),), (2,)),))),
        ),
    )
    rows = replay.group_rows(plan, COST)
    assert [(row.members, row.level, row.num_tokens) for row in rows] == [
        (((0, 0),), 0, 4),
        (((0, 1), (1, 0)), 1, 6),
        (((1, 1), (2, 0)), 2, 8),
        (((2, 1),), 3, 2),
    ]
    assert [row.predicted_seconds for row in rows] == [
        100 + 16 + 40,
        100 + 36 / 2 + 30,
        100 + 64 / 2 + 40,
        100 + 4 + 20,
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_micro_batch_is_in_one_row_and_each_rank_in_one_row_of_a_level(seed: int) -> None:
    lengths = replay.step_lengths(40, 4, 256, seed)
    plan = plan_naive(lengths, 4, 256)
    rows = replay.group_rows(plan, COST)
    members = [member for row in rows for member in row.members]
    assert sorted(members) == [(rank, index) for rank, row in enumerate(plan.ranks) for index in range(len(row))]
    for rank in range(4):
        order = [(row.level, index) for row in rows for who, index in row.members if who == rank]
        assert [index for _, index in order] == list(range(len(order)))
        assert len({level for level, _ in order}) == len(order)


def test_lengths_have_long_and_short_ones() -> None:
    lengths = replay.step_lengths(32, 2, 1024, seed=0)
    assert lengths == replay.step_lengths(32, 2, 1024, seed=0) != replay.step_lengths(32, 2, 1024, seed=1)
    assert len(lengths) == 32
    assert min(lengths) >= 32
    assert sum(length > 1024 for length in lengths) >= 3
    assert max(lengths) <= 2048
    assert max(replay.step_lengths(32, 1, 1024, seed=0)) <= 1024  # one rank has no rings


def rows(*ratios: float) -> list[replay.Row]:
    return [
        replay.Row(((0, i),), i, 8, predicted_seconds=ratio, measured_seconds=1.0) for i, ratio in enumerate(ratios)
    ]


def step(measured: float) -> dict[str, float]:
    return {"measured_seconds": measured, "predicted_seconds": 1.0, "thread_seconds": 0.7, "process_seconds": 0.8}


def test_summary_by_hand() -> None:
    found = replay.summarize(rows(1.0, 1.05, 0.5, 1.2), step(1.25))
    assert found["micro_batches"] == {
        "count": 4, "median_ratio": pytest.approx(1.025), "worst_ratio": 0.5, "within_target": 0.5,
    }  # fmt: skip
    assert found["step"] == {**step(1.25), "ratio": pytest.approx(0.8)}
    assert not found["reached"]
    assert replay.summarize(rows(1.0, 1.05), step(1.05))["reached"]
    assert not replay.summarize(rows(1.2, 1.2), step(1.0))["reached"]


def run_script(rank: int, world: int, words: list[str]) -> str:
    """Run the script as a rank that torchrun started; return what it printed."""
    sys.argv = ["replay.py", *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert replay.main() == 0
    return printed.getvalue()


@pytest.mark.ranks
def test_a_tiny_run() -> None:
    """On two CPU ranks, with a cost file so that nothing depends on the fit of noise."""
    cost = ROOT / "tests" / "bench" / "plan" / "demo_cost.json"
    words = ["--tokens-per-rank", "128", "--num-sequences", "10", "--repeats", "1", "--json", "--cost-file", str(cost)]
    printed = run_ranks(run_script, 2, words)[0]
    figures = json.loads(printed.splitlines()[-1])
    assert figures["setting"]["num_ranks"] == 2
    assert figures["setting"]["cost"] == str(cost)
    assert any(len(row["members"]) == 2 for row in figures["rows"])  # a ring
    assert all(row["measured_seconds"] > 0 for row in figures["rows"])
    step = figures["step"]
    assert 0 < step["thread_seconds"] <= step["process_seconds"]
    assert step["measured_seconds"] > 0
    assert "own thread" in printed
    assert "waiting" in printed
    assert f"of {len(figures['rows'])} within 10%" in printed
