from __future__ import annotations

from bytescale_ext.plan.step.micro_batch import Shard
from bytescale_ext.plan.step.show import plan_line, plan_table, plan_text, ring_text, shard_text
from tests.plan.simple_plans import plan_naive


def test_shards_and_rings() -> None:
    ring = tuple(range(8))
    assert shard_text(Shard(3, ((0, 512), (3584, 4096)), ring)) == "seq 3 [0:512][3584:4096] ring 0-7"
    assert shard_text(Shard(3, ((0, 512),), ring, 2)) == "seq 3 [0:512] ring 0-7 in 2 inner rings"
    assert shard_text(Shard(1, ((0, 9),), (4,))) == "seq 1 [0:9]"
    assert ring_text((2, 3)) == "2,3"
    assert ring_text((0, 2, 5)) == "0,2,5"


def test_table_has_a_row_for_each_micro_batch() -> None:
    plan = plan_naive([20, 3, 4], 3, 8)
    lines = plan_table(plan).splitlines()
    assert len(lines) == 1 + sum(len(rank) for rank in plan.ranks)
    assert lines[1].split() == ["0", "0", "7", "seq", "0", "[0:4][17:20]", "ring", "0-2"]
    assert not any(line.startswith(">>") for line in lines)
    assert plan_text(plan).splitlines()[:-1] == lines


def test_summary_line() -> None:
    assert plan_line(plan_naive([20, 3, 4], 3, 8)) == (
        "3 sequences, 27 tokens on 3 ranks of 8 tokens: 1-2 micro-batches and 7-13 tokens per rank"
    )


def test_marked_rows_are_kept_in_a_short_table() -> None:
    plan = plan_naive([8] * 100, 10, 8)
    lines = plan_table(plan, marked=[(6, 3)], max_rows=9).splitlines()
    assert len(lines) == 1 + 9 + 2
    assert [line for line in lines if line.startswith(">>")] == [">>    6            3        8  seq 36 [0:8]"]
    assert lines[1].strip() == lines[-1].strip() == "..."
    assert lines[6].startswith(">>")  # four rows above and four below


def test_only_marked_rows_show_all_shards() -> None:
    plan = plan_naive([1] * 8, 1, 8)
    assert plan_table(plan, max_shards=3).endswith("seq 2 [0:1], and 5 more")
    assert plan_table(plan, marked=[(0, 0)], max_shards=3).endswith("seq 7 [0:1]")
