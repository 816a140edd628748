"""A run logs correct figures: the hdp line, metrics.jsonl, TensorBoard, FLOPs, timers and the timeline."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.measure.devices import scaled_device_cost
from bytescale_ext.measure.timeline import read_phases
from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.step.plan import StepPlan
from tests.e2e.corpora import write_documents
from tests.e2e.devices import on_ghosts
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, record_steps, train_ranks
from tests.plan.simple_plans import plan_naive
from tests.sample import sampled

pytestmark = pytest.mark.ranks

# Sizes of MODEL; the vocabulary is padded to 128.
SHAPE = ModelShape(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden=48, gated=True, vocab=128
)
TIMELINE_STEP = 4
CASES: dict[str, tuple[int, int, int, list[str]]] = {
    # name: (HDP ranks, C, multiple of the rows of a micro-batch, more flags)
    "plain": (4, 64, 1, []),
    "tensor-and-sequence-parallel": (
        2,
        128,
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split(),
    ),
}


@dataclass(frozen=True)
class Run:
    """Run of six steps that logs every second step."""

    outcomes: list[Outcome]
    folder: Path
    plans: list[StepPlan]
    num_ranks: int
    rows_multiple: int

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def printed(self, name: str) -> list[Any]:
        """Return the figures that ``record_figures`` printed on the last rank."""
        return [json.loads(line) for line in re.findall(rf"^{name} (.*)$", self.outcomes[-1].text, re.MULTILINE)]


def record_figures() -> None:
    """Entry that records the sums for Megatron's FLOP counter, and the time of each log interval."""
    from megatron.training import training

    from bytescale_ext.measure.metrics import IntervalMetrics

    consume, of = training.consume_seqlen_stats_in_iteration, IntervalMetrics.of

    def consume_and_print() -> Any:
        sums = consume()
        print(f"SUMS {json.dumps(sums)}")
        return sums

    def of_and_print(iteration: int, num_steps: int, seconds: float, ranks: Any) -> IntervalMetrics:
        print(f"SECONDS {seconds!r}")
        return of(iteration, num_steps, seconds, ranks)

    training.consume_seqlen_stats_in_iteration = consume_and_print
    IntervalMetrics.of = of_and_print  # type: ignore[method-assign, assignment]
    record_steps()


@pytest.fixture(scope="module", params=sampled(CASES, ["plain"]))
def logged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    num_ranks, tokens_per_rank, multiple, flags = CASES[request.param]
    folder = tmp_path_factory.mktemp("run")
    corpus = write_documents(folder / "docs")
    log = ["--log-interval", 2, "--log-throughput", "--log-timers-to-tensorboard", "--timing-log-level", 2,
           "--tensorboard-dir", folder / "events", "--tensorboard-log-interval", 1,
           "--hdp-log-dir", folder, "--hdp-timeline-step", TIMELINE_STEP]  # fmt: skip
    outcomes = train_ranks(4, *MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-balance", "none",
                           "--hdp-tokens-per-rank", tokens_per_rank, "--hdp-learn-costs", "off",
                           "--train-iters", 6, *log, *flags, entry=record_figures)  # fmt: skip
    plans = [plan_naive(record["lengths"], num_ranks, tokens_per_rank, tokens_multiple=multiple)
             for record in outcomes[0].records()]  # fmt: skip
    assert len(plans) == 6
    return Run(outcomes, folder, plans, num_ranks, multiple)


def intervals(run: Run) -> list[list[StepPlan]]:
    return [run.plans[start : start + 2] for start in (0, 2, 4)]


def test_each_interval_has_one_line_and_one_row(logged: Run) -> None:
    lines = re.findall(r"^ hdp: .*$", logged.outcomes[-1].text, re.MULTILINE)
    assert [row["iteration"] for row in logged.metrics] == [2, 4, 6]
    assert [row["num_steps"] for row in logged.metrics] == [2, 2, 2]
    assert len(lines) == 3
    for line, row in zip(lines, logged.metrics, strict=True):
        counts = " ".join(f"{count:g}" for count in row["micro_batches_per_rank"])
        assert f" hdp: {row['tokens_per_second']:,.0f} tokens/s | micro-batches per rank: {counts} | " in line
        assert f"imbalance planned {row['planned_imbalance']:.2f} " in line
        assert f"padding {100 * row['padding_share']:.2f}% " in line
        printed = re.findall(r"step time predicted/measured (\S+) \| ", line)
        assert [float(ratio) for ratio in printed] == pytest.approx([row["predicted_over_measured"]], rel=0.1)
    assert all(" hdp: " not in outcome.text for outcome in logged.outcomes[:-1])


def test_tokens_are_those_of_the_documents(logged: Run) -> None:
    seconds = [float(value) for value in re.findall(r"^SECONDS (.*)$", logged.outcomes[-1].text, re.MULTILINE)]
    for row, plans, time in zip(logged.metrics, intervals(logged), seconds, strict=True):
        tokens = sum(sum(plan.lengths) for plan in plans)
        assert row["tokens_per_second"] * time == pytest.approx(tokens, rel=1e-9)


def test_the_time_of_steps_is_within_what_megatron_measured(logged: Run) -> None:
    seconds = [float(value) for value in re.findall(r"^SECONDS (.*)$", logged.outcomes[-1].text, re.MULTILINE)]
    elapsed = re.findall(r"iteration +\d*[246]/.*elapsed time per iteration \(ms\): ([\d.]+)", logged.outcomes[-1].text)
    # Megatron's first interval counts the first step twice, because it is also logged separately and not reset then.
    for ours, megatrons in list(zip(seconds, elapsed, strict=True))[1:]:
        assert 0 < 1000 * ours / 2 <= float(megatrons) + 1.0


def test_micro_batches_padding_and_imbalance_are_the_plans(logged: Run) -> None:
    known = scaled_device_cost(SHAPE, 4 // logged.num_ranks, "float32")
    cost = known.whole().with_padding((logged.rows_multiple - 1) / 2).both
    for row, plans in zip(logged.metrics, intervals(logged), strict=True):
        ranks = range(logged.num_ranks)
        of_rank = [[(mb, plan.lengths) for plan in plans for mb in plan.ranks[rank]] for rank in ranks]
        assert row["micro_batches_per_rank"] == [len(micro_batches) / 2 for micro_batches in of_rank]
        work = [sum(cost.micro_batch_cost(mb, lengths) for mb, lengths in mbs) for mbs in of_rank]
        assert row["planned_imbalance"] == pytest.approx(max(work) / (sum(work) / len(work)))
        tokens = [mb.num_tokens for micro_batches in of_rank for mb, _ in micro_batches]
        rows = [-(-count // logged.rows_multiple) * logged.rows_multiple for count in tokens]
        assert row["padding_share"] == pytest.approx((sum(rows) - sum(tokens)) / sum(rows))
        assert row["megabytes_sent_per_step"] > 0
        assert row["measured_imbalance"] >= 1
        assert row["plan_wait_ms"] >= 0
    assert any(row["padding_share"] > 0 for row in logged.metrics) == (logged.rows_multiple > 1)


def test_flops_are_counted_from_the_lengths(logged: Run) -> None:
    sums = logged.printed("SUMS")
    for (tokens, squares), plan in zip(sums, logged.plans, strict=True):
        assert tokens == sum(plan.lengths)
        assert squares == sum(length**2 for length in plan.lengths)


def test_how_far_the_run_is(logged: Run) -> None:
    lines = re.findall(r"^ run: .*$", logged.outcomes[-1].text, re.MULTILINE)
    tokens = 0
    for line, row, plans in zip(lines, logged.metrics, intervals(logged), strict=True):
        tokens += sum(sum(plan.lengths) for plan in plans)
        assert row["tokens_so_far"] == tokens
        assert f"loss of the last step {row['loss']:.4f}" in line
        assert row["eta_seconds"] == pytest.approx((6 - row["iteration"]) * row["step_seconds"])
        assert (
            f"learning rate {row['learning_rate']:.2e} | gradient norm {row['gradient_norm']:.3f} | {tokens:,} " in line
        )
        assert ("mfu" in row) == on_ghosts()  # the peak of a CPU is not in the table


# Figures of disabled features are zero or one in every step, so they are not scalars.
OFF = ("kept_megabytes_per_step", "swapped_megabytes_per_step", "recomputed_megabytes_per_step", "host_peak_megabytes",
       "slices_per_micro_batch", "device_peak_megabytes", "active_experts", "stale_steps",
       "most_stale_steps", "table_hit_rate", "table_staleness")  # fmt: skip


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return TensorBoard's values by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_loss_our_figures_and_the_true_throughput(logged: Run) -> None:
    values = scalars(logged.folder)
    assert not [name for name in OFF if f"hdp/{name}" in values]
    assert set(values["lm loss"]) == set(range(1, 7))
    for row in logged.metrics:
        step = row["iteration"]
        for name, value in row.items():
            if isinstance(value, float) and name not in ("lm loss", *OFF):
                assert values[f"hdp/{name}"][step] == pytest.approx(value, rel=1e-5)
        assert values["lm loss"][step] == pytest.approx(row["loss"], rel=1e-5)
        of_steps = [values["lm loss"][step - 1], values["lm loss"][step]]
        assert row["lm loss"] == pytest.approx(sum(of_steps) / 2, rel=1e-5)
        # Megatron divides the FLOPs of the interval's last step by the mean time of its steps.
        flops = values["throughput"][step] * values["iteration-time"][step] * 1e12 * len(logged.outcomes)
        assert flops == pytest.approx(model_flops(SHAPE, logged.plans[step - 1].lengths), rel=0.02)


def test_throughput_and_timers_are_printed(logged: Run) -> None:
    text = logged.outcomes[-1].text
    assert len(re.findall(r"throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \|", text)) == 4  # and after the first step
    everyones = "".join(outcome.text for outcome in logged.outcomes)
    for timer in ("forward-backward", "forward-compute", "backward-compute", "all-grads-sync", "optimizer"):
        assert re.search(rf"^ +{timer} \.+: \(", everyones, re.MULTILINE), timer


def test_the_timeline_is_that_of_the_step(logged: Run) -> None:
    phases = read_phases(logged.folder / "timeline")
    assert {phase.step for phase in phases} == {TIMELINE_STEP}
    plan = logged.plans[TIMELINE_STEP - 1]
    for rank, micro_batches in enumerate(plan.ranks):
        mine = [phase for phase in phases if phase.rank == rank]
        assert all(a.stop <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
        for kind in ("forward", "backward"):
            shards = {phase.micro_batch: [(s.seq, s.tokens, s.ring) for s in phase.shards]
                      for phase in mine if phase.kind == kind}  # fmt: skip
            assert shards == {
                index: [(s.seq, s.num_tokens, tuple(s.ring)) for s in micro_batch.shards]
                for index, micro_batch in enumerate(micro_batches)
            }
