from __future__ import annotations

import math
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.measure.metrics import IntervalMetrics, Mark, RankStep, StepClock, append_jsonl
from bytescale_ext.measure.timeline import PhaseShard, read_phases
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard

MICRO_BATCHES = (
    MicroBatch((Shard(0, ((0, 16), (48, 64)), (0, 1)),)),
    MicroBatch((Shard(1, ((0, 5),), (0,)), Shard(2, ((0, 7),), (0,)))),
)
LENGTHS = (64, 5, 7)


def clock_of(*marks: tuple[str, int | None, float, float]) -> StepClock:
    clock = StepClock(on_cuda=False)
    clock.marks = [Mark(kind, index, wall, busy, None) for kind, index, wall, busy in marks]
    return clock


STEP = (
    ("wait", None, 100.0, 1.0),
    ("forward", 0, 101.0, 1.5),
    ("backward", 0, 103.0, 2.0),
    ("forward", 1, 106.0, 4.0),
    ("backward", 1, 107.0, 4.5),
    ("reduce", None, 109.0, 5.5),
    ("end", None, 110.0, 9.0),
)


def test_work_is_processor_time_in_forward_and_backward_passes() -> None:
    assert clock_of(*STEP).work_seconds() == 4.0
    waiting = ("wait", None, 104.0, 2.5)  # waits for another pipeline stage, until the next forward pass
    assert clock_of(*STEP[:3], waiting, *STEP[3:]).work_seconds() == 2.5


def test_backward_passes_of_a_micro_batch_take_wall_time() -> None:
    assert clock_of(*STEP).backward_seconds() == {0: 3.0, 1: 2.0}
    slices = ("wait", None, 104.0, 2.5), ("backward", 0, 104.5, 2.5), ("backward", None, 105.5, 2.5)
    assert clock_of(*STEP[:3], *slices, *STEP[3:]).backward_seconds() == {0: 2.0, 1: 2.0}


def test_the_processor_time_to_note_may_be_another() -> None:
    readings = iter([1.0, 2.0, 4.5])
    clock = StepClock(on_cuda=False, busy_time=readings.__next__)
    clock.begin(traced=False)
    for kind in ("forward", "end"):
        clock.mark(kind)
    assert clock.work_seconds() == 2.5


def test_waiting_is_no_work() -> None:
    clock = StepClock(on_cuda=False)
    clock.begin(traced=False)
    clock.mark("forward", 0)
    threading.Event().wait(0.2)
    clock.mark("reduce")
    assert clock.marks[2].wall_seconds - clock.marks[1].wall_seconds > 0.15
    assert clock.work_seconds() < 0.1


def test_phases_can_be_read_as_a_timeline(tmp_path: Path) -> None:
    for rank in (0, 1):
        phases = clock_of(*STEP).phases(7, rank, MICRO_BATCHES, LENGTHS)
        append_jsonl(tmp_path / f"rank{rank}.jsonl", map(asdict, phases))
    phases = [phase for phase in read_phases(tmp_path) if phase.rank == 1]
    assert [phase.kind for phase in phases] == ["wait", "forward", "backward", "forward", "backward", "reduce"]
    assert {phase.step for phase in phases} == {7}
    assert [(phase.start, phase.stop) for phase in phases[:2]] == [(100.0, 101.0), (101.0, 103.0)]
    assert phases[1].micro_batch == 0
    assert phases[0].micro_batch is None
    assert phases[1].shards == (PhaseShard(seq=0, length=64, tokens=32, ring=(0, 1)),)
    assert [shard.length for shard in phases[3].shards] == [5, 7]
    assert phases[0].shards == () == phases[5].shards


def test_figures_of_steps_add_up() -> None:
    one = RankStep(*(float(i + 1) for i in range(len(fields(RankStep)))))
    assert one + RankStep() == one
    doubled = RankStep(*(2 * value for value in one.values()))
    assert one + one == replace(doubled, host_peak_bytes=one.host_peak_bytes, device_peak_bytes=one.device_peak_bytes)
    assert one.values()[:3] == (one.work_seconds, one.planned_work, one.num_micro_batches) == (1.0, 2.0, 3.0)
    assert RankStep(*one.values()) == one


def test_stages_of_a_pipeline_share_their_micro_batches_and_add_their_work() -> None:
    first = RankStep(work_seconds=3.0, planned_work=9.0, num_micro_batches=4, num_tokens=90, num_rows=100,
                     plan_wait_seconds=0.2, bytes_sent=3e6, attention_calls=10)  # fmt: skip
    second = replace(first, work_seconds=1.0, plan_wait_seconds=0.6, bytes_sent=1e6, attention_calls=20)
    assert RankStep.of_stages([first]) == first
    assert RankStep.of_stages([first, second]) == replace(
        first, work_seconds=4.0, plan_wait_seconds=0.6, bytes_sent=4e6, attention_calls=30
    )


def test_activations_add_up_and_their_peak_does_not() -> None:
    first = RankStep(num_micro_batches=1, kept_bytes=4e6, swapped_bytes=2e6, recomputed_bytes=6e6, host_peak_bytes=3e6)
    second = replace(first, swapped_bytes=3e6, host_peak_bytes=5e6)
    both = RankStep.of_stages([first, second])
    assert (both.kept_bytes, both.swapped_bytes, both.recomputed_bytes, both.host_peak_bytes) == (8e6, 5e6, 12e6, 5e6)
    metrics = IntervalMetrics.of(4, 2, 1.0, [first + first, second + first])
    assert (metrics.kept_megabytes_per_step, metrics.swapped_megabytes_per_step) == (8.0, 4.5)
    assert metrics.line().endswith("activations kept 8.0 swapped 4.5 recomputed 12.0 MB/step, host peak 5.0 MB")
    assert "activations" not in IntervalMetrics.of(4, 2, 1.0, [RankStep(num_micro_batches=1)]).line()


def test_memory_is_that_of_the_process_that_needs_most() -> None:
    stages = RankStep.of_stages([RankStep(device_peak_bytes=3e6), RankStep(device_peak_bytes=5e6)])
    metrics = IntervalMetrics.of(4, 2, 1.0, [stages + RankStep(), RankStep(device_peak_bytes=4e6)])
    assert metrics.scalars()["device_peak_megabytes"] == 5.0
    assert metrics.line().endswith(" | memory 5.0 MB")
    assert "memory" not in IntervalMetrics.of(4, 2, 1.0, [RankStep()]).line()


def test_tables_count_the_rows_of_all_ranks_and_stages() -> None:
    stage = RankStep(rows_read=100, rows_fetched=10, updates_lacking=30)
    other = RankStep(rows_read=60, rows_fetched=6)
    metrics = IntervalMetrics.of(4, 2, 1.0, [RankStep.of_stages([stage, other]) + RankStep(), RankStep(rows_read=40)])
    assert (metrics.scalars()["table_hit_rate"], metrics.scalars()["table_staleness"]) == (0.92, 0.15)
    assert metrics.line().endswith(" | tables: 92.0% hits, rows lack 0.15 updates")
    assert "tables" not in IntervalMetrics.of(4, 2, 1.0, [RankStep()]).line()


def test_slices_are_a_mean_over_steps() -> None:
    """The planner may choose other slices in each step. Without slices their figures are left out."""
    steps = RankStep(num_micro_batches=1, num_slices=12) + RankStep(num_micro_batches=1, num_slices=8)
    metrics = IntervalMetrics.of(4, 2, 1.0, [steps, steps])
    assert metrics.slices_per_micro_batch == 10.0
    assert metrics.line().endswith("MB/step | slices 10")
    whole = IntervalMetrics.of(4, 2, 1.0, [RankStep(num_micro_batches=2, num_slices=2)])
    assert whole.slices_per_micro_batch == 1.0
    assert "slices" not in whole.line()


RANKS = (
    RankStep(work_seconds=3.0, planned_work=9.0, num_micro_batches=4, num_tokens=90, num_rows=100,
             plan_wait_seconds=0.2, bytes_sent=3e6, attention_calls=10),
    RankStep(work_seconds=1.0, planned_work=3.0, num_micro_batches=1, num_tokens=60, num_rows=100,
             plan_wait_seconds=0.6, bytes_sent=1e6, attention_calls=20),
)  # fmt: skip


def test_interval_metrics() -> None:
    metrics = IntervalMetrics.of(20, 2, 5.0, RANKS)
    assert metrics.iteration == 20
    assert metrics.num_steps == 2
    assert metrics.tokens_per_second == 30.0
    assert metrics.micro_batches_per_rank == (2.0, 0.5)
    assert metrics.planned_imbalance == pytest.approx(1.5)
    assert metrics.measured_imbalance == pytest.approx(1.5)
    assert metrics.padding_share == pytest.approx(0.25)
    assert metrics.plan_wait_ms == pytest.approx(300.0)
    assert metrics.megabytes_sent_per_step == pytest.approx(2.0)
    assert metrics.attention_calls_per_step == 15.0


def test_line() -> None:
    line = IntervalMetrics.of(20, 2, 0.05, RANKS).line()
    assert "\n" not in line
    assert "3,000 tokens/s" in line
    assert "micro-batches per rank: 2 0.5 |" in line
    assert "imbalance planned 1.50 measured 1.50" in line
    assert "padding 25.00%" in line
    assert "waited for plan 300.0 ms" in line
    assert "ring traffic 2.0 MB/step" in line


def test_predicted_times_are_in_the_line() -> None:
    metrics = IntervalMetrics.of(20, 2, 0.05, RANKS)
    assert "predicted/measured" not in metrics.line(), "nothing was predicted"
    assert " | step time predicted/measured 0.97 | " in replace(metrics, predicted_over_measured=0.9731).line()
    assert " | step time predicted/measured 0.00012 | " in replace(metrics, predicted_over_measured=1.23e-4).line()


def test_passes_span_waits() -> None:
    clock = clock_of(("wait", None, 0.0, 0.0), ("forward", 0, 1.0, 0.0), ("wait", None, 2.0, 0.0),
                     ("backward", 0, 4.0, 0.0), ("reduce", None, 6.0, 0.0), ("end", None, 7.0, 0.0))  # fmt: skip
    assert clock.pass_span() == 5.0
    assert clock_of(("wait", None, 0.0, 0.0), ("end", None, 7.0, 0.0)).pass_span() == 0.0
    stages = [RankStep(pass_seconds=seconds) for seconds in (2.0, 3.0)]
    assert RankStep.of_stages(stages).pass_seconds == 3.0


def test_steps_without_labels_are_valid_json(tmp_path: Path) -> None:
    rows = [{"iteration": 1, "lm loss": math.nan, "more": {"a": [math.inf, 2.0]}}, {"lm loss": 1.5}]
    append_jsonl(tmp_path / "m.jsonl", rows)
    lines = (tmp_path / "m.jsonl").read_text().split("\n")
    assert lines == ['{"iteration": 1, "lm loss": null, "more": {"a": [null, 2.0]}}', '{"lm loss": 1.5}', ""]


def test_a_full_disk_is_a_warning_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        append_jsonl(Path("/dev/full"), [{"iteration": 1}])
    warning = "warning: /dev/full is no longer written (No space left on device); training continues\n"
    assert capsys.readouterr().err == warning


class Stream:
    """A stream of CUDA that runs behind the host; events get the seconds at which the stream passes them."""

    def __init__(self) -> None:
        self.now, self.waits = 50.0, 0

    def event(self, enable_timing: bool) -> Any:
        """Return an event, which ``record`` puts at the end of the stream."""
        stream, event = self, SimpleNamespace(at=0.0)

        def wait() -> None:
            stream.waits += 1

        event.record = lambda: setattr(event, "at", stream.now)
        event.synchronize = wait
        event.elapsed_time = lambda later: 1000 * (later.at - event.at)
        return event


def test_a_traced_step_on_a_gpu_waits_for_events_before_and_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the device within a step would also wait for reductions of gradients, and so for other ranks."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("the host waits for the device"))
    clock = StepClock(on_cuda=True)
    clock.begin(traced=True)
    assert stream.waits == 1
    begun = clock.marks[0].wall_seconds
    for seconds, kind in ((1.0, "forward"), (2.0, "backward"), (0.5, "end")):
        stream.now += seconds
        clock.mark(kind, 0)
    assert stream.waits == 1
    phases = clock.phases(7, 0, MICRO_BATCHES, LENGTHS)
    assert stream.waits == 2
    assert [(phase.kind, phase.stop - phase.start) for phase in phases] == [
        ("wait", pytest.approx(1.0)), ("forward", pytest.approx(2.0)), ("backward", pytest.approx(0.5)),
    ]  # fmt: skip
    assert phases[0].start == pytest.approx(begun)
