"""The bench of replicas without a cluster: its flags, the order of its runs, its input and its output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.config.experts import PlacementConfig
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.trace import Trace, TraceHead
from scripts.bench.experts import wall_time
from scripts.bench.experts.wall_time import Bench, Steps
from scripts.cluster.emulate import BEFORE_TRAINING, Ended
from scripts.cluster.ranks import Launch
from scripts.cluster.topology import Topology
from tests.bytescale.arguments.resolving import resolved

LOG = """\
{before}
> bytescale: experts of the busiest rank have {balances[0]} times the mean tokens, 2.2 without replicas; 5 new replicas
 [2026-11-23 18:30:40.1] iteration        1/       4 | consumed samples:           16 | elapsed time per iteration \
(ms): {times[0]} | learning rate: 1.0E-03 | global batch size:    16 | lm loss: 5.8E+00 | grad norm: 0.408 |
WARNING:megatron.core.tensor_parallel.random:a line in between
> bytescale: experts of the busiest rank have {balances[1]} times the mean tokens, 2.0 without replicas; 1 new replicas
 [2026-11-23 18:30:42.1] iteration        2/       4 | consumed samples:           32 | elapsed time per iteration \
(ms): {times[1]} | learning rate: 1.0E-03 | global batch size:    16 | lm loss: 5.7E+00 | grad norm: 0.408 |
> bytescale: experts of the busiest rank have {balances[2]} times the mean tokens, 2.1 without replicas; 0 new replicas
 [2026-11-23 18:30:44.1] iteration        3/       4 | consumed samples:           48 | elapsed time per iteration \
(ms): {times[2]} | learning rate: 1.0E-03 | global batch size:    16 | lm loss: 5.6E+00 | grad norm: 0.408 |
> bytescale: experts of the busiest rank have {balances[3]} times the mean tokens, 2.3 without replicas; 0 new replicas
 [2026-11-23 18:30:46.1] iteration        4/       4 | consumed samples:           64 | elapsed time per iteration \
(ms): {times[3]} | learning rate: 1.0E-03 | global batch size:    16 | lm loss: 5.5E+00 | grad norm: 0.408 |
"""


def log_of(times: Sequence[float], balances: Sequence[float]) -> str:
    """Return the log of the last rank after four steps."""
    return LOG.format(before=BEFORE_TRAINING, times=times, balances=balances)


def trace_of(kept: float, steps: int = 4) -> Trace:
    """Return loads of two layers with a share of all (token, expert) pairs, half of them on the first rank."""
    each = round(kept * wall_time.TOKENS * wall_time.TOPK / wall_time.RANKS)
    loads = np.zeros((steps, 2, wall_time.RANKS, wall_time.EXPERTS), np.int64)
    loads[..., 0], loads[..., 2], loads[..., 4] = each // 2, each // 4, each // 4
    return Trace(TraceHead(wall_time.EXPERTS, wall_time.TOPK, wall_time.RANKS), (1, 2), loads)


def write_trace(path: Path, trace: Trace) -> None:
    """Append loads like a training."""
    rows: list[object] = [] if path.exists() else [asdict(trace.head)]
    for step, loads in enumerate(trace.loads):
        by_layer = {str(layer): row.tolist() for layer, row in zip(trace.layers, loads, strict=True)}
        rows.append({"step": step + 1, "loads": by_layer})
    with path.open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


STATIC = Steps.of(log_of([9000.0, 4000.0, 2500.0, 2700.0], [2.205, 2.0, 2.1, 2.3]))
DROPPED = Steps.with_drops(log_of([9000.0, 4000.0, 1250.0, 1350.0], [1.0] * 4), trace_of(0.5))
FLEXMOE = Steps.of(log_of([9000.0, 2000.0, 1250.0, 1350.0], [2.205, 1.5, 1.0, 1.1]))


def bench_of(folder: Path, *words: str) -> Bench:
    return wall_time.bench_of(wall_time.build_parser().parse_args(["--folder", str(folder), *words]))


def test_steps_are_read_from_the_log() -> None:
    assert (
        Steps(
            ms=(9000.0, 2000.0, 1250.0, 1350.0),
            losses=(5.8, 5.7, 5.6, 5.5),
            balance=(2.205, 1.5, 1.0, 1.1),
            plain_balance=(2.2, 2.0, 2.1, 2.3),
            moves=(5, 1, 0, 0),
        )
        == FLEXMOE
    )


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("Traceback", "0 steps and 0 lines about experts"),
        (log_of([1.0] * 4, [1.0] * 4).replace("busiest", "idlest", 1), "4 steps and 3 lines about experts"),
        ("\n".join(log_of([1.0] * 4, [1.0] * 4).splitlines()[:6]), "2 steps and 2 lines about experts"),
    ],
    ids=["none", "a line is missing", "too few"],
)
def test_a_log_without_steps_is_refused(log: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Steps.of(log)


def test_a_loss_that_is_not_a_number_equals_no_loss() -> None:
    log = log_of([1.0] * 4, [1.0] * 4).replace("5.6E+00", "nan")
    assert str(Steps.of(log).losses[2]) == "nan"
    with pytest.raises(RuntimeError, match="losses of flexmoe are up to nan"):
        wall_time.rows_of({"static": [STATIC], "flexmoe": [Steps.of(log)]})


def test_arms_are_compared_by_the_median_of_counted_steps() -> None:
    plain, placed = wall_time.rows_of({"static": [STATIC, FLEXMOE], "flexmoe": [FLEXMOE, FLEXMOE]})
    assert (plain.arm, placed.arm) == ("static", "flexmoe")
    assert plain.ms == (1350 + 2500) / 2
    assert placed.ms == (1250 + 1350) / 2
    assert plain.speedup == 1
    assert placed.speedup == pytest.approx(1925 / 1300)
    assert placed.speedups == (2.0, 1.0)
    assert placed.balance == pytest.approx(1.05)
    assert placed.plain_balance == pytest.approx(2.2)
    assert placed.moves == 6


def test_arms_with_other_losses_are_not_compared() -> None:
    close, far = ("5.500011E+00", "5.5006E+00")
    log = log_of([1.0] * 4, [1.0] * 4)
    near = Steps.of(log.replace("5.5E+00", close))
    assert len(wall_time.rows_of({"static": [STATIC], "flexmoe": [near]})) == 2
    with pytest.raises(RuntimeError, match=r"losses of flexmoe are up to 1\.1e-04 from"):
        wall_time.rows_of({"static": [STATIC], "flexmoe": [near, Steps.of(log.replace("5.5E+00", far))]})


def test_samples_are_written_for_all_steps(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "--steps", "3")
    wall_time.write_documents(bench)
    data = IndexedDataset(str(bench.documents))
    assert set(data.sequence_lengths.tolist()) == {wall_time.SAMPLE}
    assert len(data) >= 3 * wall_time.RANKS * wall_time.SAMPLES
    assert max(int(data[place].max()) for place in range(len(data))) <= 255


def test_only_the_placement_differs_between_arms(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    plain, placed = bench.words("static"), bench.words("flexmoe")
    assert [pair for pair in zip(plain, placed, strict=True) if len(set(pair)) == 2] == [("static", "flexmoe")]


def value_of(words: Sequence[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Make this process look like one of four ranks."""
    monkeypatch.setenv("WORLD_SIZE", str(wall_time.RANKS))
    monkeypatch.setenv("RANK", "0")
    return monkeypatch


def test_megatron_and_the_feature_accept_the_flags(tmp_path: Path, argv: pytest.MonkeyPatch) -> None:
    """The flags are parsed and resolved like on a rank."""
    from megatron.bytescale.arguments.parse import parse
    from megatron.bytescale.arguments.resolve import resolve

    words = bench_of(tmp_path).words("eplb")
    argv.setattr(sys, "argv", words)
    args = parse(words, on_cpu=True)
    run = resolve(args)
    config = run.get(PlacementConfig)
    assert (config.num_experts, config.num_ranks) == (wall_time.EXPERTS, wall_time.RANKS)
    placing = config.placing
    assert (placing.placement, placing.num_slots, placing.interval) == ("eplb", wall_time.SLOTS, 1)
    assert isinstance(run.shape, ModelShape)
    assert placing.cost == ExpertCost.of(run.shape, 0.01e12, 0.1e9)
    assert args.moe_router_force_biased == -2.0
    assert args.global_batch_size == args.micro_batch_size * wall_time.RANKS, "one micro-batch in each step"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Launch, Topology]]:
    """Replace the cluster, and return its runs. Ranks of flexmoe take half the time."""
    ran: list[tuple[str, Launch, Topology]] = []

    def run(topology: Topology, launch: Launch) -> Ended:
        is_capacity = "--moe-expert-capacity-factor" in launch.command
        arm = "capacity" if is_capacity else value_of(launch.command, "--moe-placement")
        if is_capacity:
            write_trace(Path(value_of(launch.command, "--moe-placement-trace")), trace_of(0.5))
        ran.append((arm, launch, topology))
        launch.log_dir.mkdir(parents=True)
        is_placed = arm == "flexmoe"
        times = [1000.0 if is_placed else 2000.0] * 4
        launch.log(wall_time.RANKS - 1).write_text(log_of(times, [1.0 if is_placed else 2.0] * 4))
        return Ended(0, None)

    monkeypatch.setattr(wall_time, "run", run)
    monkeypatch.setattr(wall_time, "preload", lambda: None)
    monkeypatch.setattr(wall_time, "check_machine", lambda topology: None)
    return ran


def test_arms_take_turns_on_one_node(
    tmp_path: Path, launched: list[tuple[str, Launch, Topology]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--folder", str(tmp_path), "--steps", "4", "--cores-per-rank", "0.3", "--json"]
    assert wall_time.main(words) == 0
    assert [arm for arm, _, _ in launched] == ["static", "flexmoe", "flexmoe", "static"]
    assert {topology for _, _, topology in launched} == {Topology(1, 4, 0.0, 1.0, 0.0, 0.3)}
    assert len({launch.log_dir for _, launch, _ in launched}) == 4
    assert all(launch.is_warm and launch.quota_after == BEFORE_TRAINING for _, launch, _ in launched)
    assert IndexedDataset(value_of(launched[0][1].command, "--data-path")).sequence_lengths.size > 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "static: 2000 ms a step, 1.00 times as fast as static (rounds: 1.00, 1.00); busiest rank 2.00"
    )
    assert re.search(
        r"flexmoe: 1000 ms a step, 2\.00 times as fast as static .* 1\.00 times the mean, 2\.20 without replicas; "
        r"6 new replicas; ",
        second,
    )
    assert [(row["arm"], row["speedup"]) for row in json.loads(last)] == [("static", 1.0), ("flexmoe", 2.0)]


def test_an_earlier_log_is_not_read(tmp_path: Path, launched: list[tuple[str, Launch, Topology]]) -> None:
    bench = bench_of(tmp_path)
    left = tmp_path / "flexmoe-1" / "rank3.log"
    left.parent.mkdir()
    left.write_text("left")
    assert wall_time.run_arm(bench, "flexmoe", 0).ms == (1000.0,) * 4
    assert "left" not in left.read_text()


def test_a_run_that_fails_ends_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    launched: list[tuple[str, Launch, Topology]],
) -> None:  # fmt: skip
    works = wall_time.run

    def run(topology: Topology, launch: Launch) -> Ended:
        works(topology, launch)
        launch.log(wall_time.RANKS - 1).write_text("ValueError: it stops")
        return Ended(7, None)

    monkeypatch.setattr(wall_time, "run", run)
    assert wall_time.main(["--folder", str(tmp_path), "--steps", "4"]) == 1
    message = capsys.readouterr().err
    assert "static ended with exit code 7" in message
    assert message.rstrip().endswith("ValueError: it stops")
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds 0, --steps 12: give 1 and 3 or more"),
        (["--steps", "2"], "--rounds 2, --steps 2: give 1 and 3 or more"),
        (["--capacity-factor", "0"], "--capacity-factor 0 must be positive and finite"),
        (["--capacity-factor", "nan"], "--capacity-factor nan must be positive and finite"),
        (["--arms", "static", "static"], "--arms static static: give each arm once"),
        (["--cores-per-rank", "0"], "--cores-per-rank 0 must be positive"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, launched: list[tuple[str, Launch, Topology]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "new"
    assert wall_time.main(["--folder", str(folder), *words]) == 2
    assert capsys.readouterr().err == f"wall_time.py: error: {message}\n"
    assert launched == []
    assert not folder.exists()


def test_dropped_tokens_are_read_from_the_trace() -> None:
    assert DROPPED.ms == (9000.0, 4000.0, 1250.0, 1350.0)
    assert DROPPED.losses == FLEXMOE.losses
    assert DROPPED.kept == (0.5,) * 4
    assert DROPPED.balance == DROPPED.plain_balance == (2.0,) * 4
    assert DROPPED.drops
    assert not Steps.with_drops(log_of([1.0] * 4, [1.0] * 4), trace_of(1.0)).drops
    with pytest.raises(ValueError, match="the log has 4 steps and the trace 3"):
        Steps.with_drops(log_of([1.0] * 4, [1.0] * 4), trace_of(0.5, steps=3))


def test_arms_are_compared_by_the_tokens_they_keep() -> None:
    """The arm that drops half of the tokens is equally fast and has other losses."""
    far = replace(DROPPED, losses=(1.0,) * 4)
    plain, placed, dropped = wall_time.rows_of({"static": [STATIC], "flexmoe": [FLEXMOE], "capacity": [far]})
    assert (plain.kept, placed.kept, dropped.kept) == (1, 1, 0.5)
    assert placed.ms == dropped.ms == 1300
    assert placed.kept_per_second == pytest.approx(wall_time.TOKENS / 1.3)
    assert dropped.kept_per_second == pytest.approx(wall_time.TOKENS / 2.6)
    assert (plain.kept_speedup, placed.kept_speedup, dropped.kept_speedup) == (1, pytest.approx(2), pytest.approx(1))


def test_losses_are_compared_if_nothing_was_dropped() -> None:
    whole = Steps.with_drops(log_of([1.0] * 4, [1.0] * 4), trace_of(1.0))
    with pytest.raises(RuntimeError, match="losses of capacity are up to"):
        wall_time.rows_of({"static": [STATIC], "capacity": [replace(whole, losses=(1.0,) * 4)]})


def test_dropped_tokens_do_not_count(
    tmp_path: Path, launched: list[tuple[str, Launch, Topology]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The loads of an earlier run are not read."""
    write_trace(bench_of(tmp_path).trace, trace_of(0.25, steps=9))
    words = ["--folder", str(tmp_path), "--steps", "4", "--rounds", "2", "--arms", "static", "capacity"]
    assert wall_time.main(words) == 0
    assert [arm for arm, _, _ in launched] == ["static", "capacity", "capacity", "static"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("4096 tokens kept per second (100.0 %), 1.00 times as many as static")
    assert second.startswith("capacity: 2000 ms a step, 1.00 times as fast as static")
    assert second.endswith("2048 tokens kept per second (50.0 %), 0.50 times as many as static")


@pytest.mark.ranks
def test_megatron_accepts_the_flags_of_the_arm_that_drops_tokens(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    run = resolved(wall_time.RANKS, *bench.words("capacity")[1:])
    (trace,) = run.features.values()
    assert (trace.path, trace.head) == (bench.trace, TraceHead(wall_time.EXPERTS, wall_time.TOPK, wall_time.RANKS))
    assert run.args["moe_expert_capacity_factor"] == 1.0
