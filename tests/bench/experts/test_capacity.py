"""The arm of the benchmark that drops tokens in place of replicas: what it runs, and what counts of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.plan.experts.trace import TraceHead
from scripts.bench.experts import wall_time
from scripts.bench.experts.wall_time import Steps
from scripts.cluster.ranks import Launch
from scripts.cluster.topology import Topology
from tests.bench.experts.test_wall_time import FLEXMOE, STATIC, bench_of, launched, log_of, trace_of, write_trace
from tests.bytescale.arguments.resolving import resolved

assert launched, "the fixture that stands in for the cluster"

DROPPED = Steps.with_drops(log_of([9000.0, 4000.0, 1250.0, 1350.0], [1.0] * 4), trace_of(0.5))


def test_dropped_tokens_are_read_from_the_trace() -> None:
    assert DROPPED.ms == (9000.0, 4000.0, 1250.0, 1350.0)
    assert DROPPED.losses == FLEXMOE.losses
    assert DROPPED.kept == (0.5,) * 4
    assert DROPPED.balance == DROPPED.plain_balance == (2.0,) * 4
    assert DROPPED.drops
    assert not Steps.with_drops(log_of([1.0] * 4, [1.0] * 4), trace_of(1.0)).drops
    assert not FLEXMOE.drops


def test_a_trace_of_other_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="the log has 4 steps and the trace 3"):
        Steps.with_drops(log_of([1.0] * 4, [1.0] * 4), trace_of(0.5, steps=3))


def test_arms_are_compared_by_the_tokens_they_keep() -> None:
    """The arm that drops half of them is as fast, and has other losses."""
    far = replace(DROPPED, losses=(1.0,) * 4)
    plain, placed, dropped = wall_time.rows_of({"static": [STATIC], "flexmoe": [FLEXMOE], "capacity": [far]})
    assert (plain.kept, placed.kept, dropped.kept) == (1, 1, 0.5)
    assert placed.ms == dropped.ms == 1300
    assert placed.kept_per_second == pytest.approx(wall_time.TOKENS / 1.3)
    assert dropped.kept_per_second == pytest.approx(wall_time.TOKENS / 2.6)
    assert (plain.kept_speedup, placed.kept_speedup, dropped.kept_speedup) == (1, pytest.approx(2), pytest.approx(1))
    (first, second) = wall_time.rows_of({"capacity": [far], "static": [STATIC]})
    assert (first.kept_speedup, second.kept_speedup) == (1, pytest.approx(1))


def test_losses_of_an_arm_that_could_have_dropped_tokens_are_compared() -> None:
    whole = Steps.with_drops(log_of([1.0] * 4, [1.0] * 4), trace_of(1.0))
    with pytest.raises(RuntimeError, match="losses of capacity are up to"):
        wall_time.rows_of({"static": [STATIC], "capacity": [replace(whole, losses=(1.0,) * 4)]})


def test_the_arm_that_drops_tokens_has_no_slots(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "--capacity-factor", "1.25")
    plain, dropped = bench.words("static"), bench.words("capacity")
    common = plain.index("--moe-expert-slots")
    assert dropped[:common] == plain[:common]
    assert dropped[common:] == ["--moe-expert-capacity-factor", "1.25", "--moe-placement-trace", str(bench.trace)]


def test_tokens_that_are_dropped_do_not_count(
    tmp_path: Path, launched: list[tuple[str, Launch, Topology]], capsys: pytest.CaptureFixture[str]
) -> None:
    """And the loads of an earlier run are not read."""
    write_trace(bench_of(tmp_path).trace, trace_of(0.25, steps=9))
    words = ["--folder", str(tmp_path), "--steps", "4", "--rounds", "2", "--arms", "static", "capacity"]
    assert wall_time.main(words) == 0
    assert [arm for arm, _, _ in launched] == ["static", "capacity", "capacity", "static"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("4096 tokens kept a second (100.0 %), 1.00 times those of static")
    assert second.startswith("capacity: 2000 ms a step, 1.00 times as fast as static")
    assert second.endswith("2048 tokens kept a second (50.0 %), 0.50 times those of static")


@pytest.mark.ranks
def test_megatron_accepts_the_flags(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    found = resolved(wall_time.RANKS, *bench.words("capacity")[1:])
    (trace,) = found.features.values()
    assert (trace.path, trace.head) == (bench.trace, TraceHead(wall_time.EXPERTS, wall_time.TOPK, wall_time.RANKS))
    assert found.args["moe_expert_capacity_factor"] == 1.0
