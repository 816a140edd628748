"""Pipelines under hybrid data parallelism train like one process with one document per micro-batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from bytescale_ext.measure.timeline import read_phases
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from tests.e2e.pipelines import (
    BALANCE,
    FULL,
    LAYOUT,
    ONE_BY_ONE,
    PP2,
    SELECTIVE,
    SHARDED,
    STEPS,
    TOLERANCE,
    UNALIGNED,
    UNEVEN,
    VIRTUAL,
    Layout,
    check_equals,
    oracle_of,
    printed,
    run,
    train_and_record,
    train_one_by_one,
)
from tests.e2e.training import CLASSIC_MODEL, HDP, Outcome

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case(Layout):
    """Layout of 4 layers with a planner that balances pipelines.

    Attributes:
        num_chunks: number of chunks of layers on each stage.
        num_idle: number of ranks without tokens.
        balance: value of --hdp-balance.
    """

    num_chunks: int = 1
    num_idle: int = 0
    balance: str = "none"


CASES = {
    "pp2": Case(4, UNEVEN, 2),
    "pp2-sharded-full": Case(4, [*UNALIGNED, *FULL], 2, balance="pp"),
    "pp2-one-idle": Case(8, SHARDED, 2, num_idle=1),
    "pp4-selective": Case(8, SELECTIVE, 4, balance="pp"),
    "tp2-pp2": Case(8, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *UNALIGNED], 2, tp_size=2,
                    balance="bytescale"),
    "pp2-virtual-full": Case(4, [*VIRTUAL, *SHARDED, *FULL, "--overlap-p2p-communication-warmup-flush"], 2,
                             num_chunks=2),
    "pp2-virtual-group": Case(
        4, [*VIRTUAL, *UNALIGNED, "--microbatch-group-size-per-virtual-pipeline-stage", "3"], 2, num_chunks=2,
        balance="pp"),
    "pp4-virtual-layout": Case(8, [*LAYOUT, *UNALIGNED], 4, num_chunks=2),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    flags = [*HDP, *BALANCE, "--hdp-balance", case.balance, "--pipeline-model-parallel-size", case.num_stages]
    entry = partial(train_and_record, case.num_idle)
    check_order(case, check_equals(oracle_of(corpus), corpus, tmp_path, case, flags, entry=entry))


def check_order(case: Case, outcomes: list[Outcome]) -> None:
    """Every stage ran ``seq1f1b_schedule`` of its pipeline's number of micro-batches, and pipelines differed."""
    group = 3 if "--microbatch-group-size-per-virtual-pipeline-stage" in case.flags else case.num_stages
    per_stage = case.num_ranks // case.num_stages
    unequal = False
    for process, outcome in enumerate(outcomes):
        stage, hdp_rank = process // per_stage, process % per_stage // case.tp_size
        plans = [StepPlan.from_json(plan) for plan in printed(outcome, "PLAN")]
        actions = printed(outcome, "ACTIONS")
        assert len(plans) == len(actions) == STEPS
        for plan, done in zip(plans, actions, strict=True):
            counts = micro_batch_counts(plan, multiple=group if case.num_chunks > 1 else 1)
            sizes = {"num_chunks": case.num_chunks, "group_size": group}
            expected = seq1f1b_schedule(case.num_stages, counts[hdp_rank], **sizes).stages[stage]
            assert [tuple(one) for one in done] == [(one.kind, one.micro_batch, one.chunk) for one in expected]
            unequal |= len(set(counts)) > 1
            assert not case.num_idle or not plan.ranks[-1]
    assert unequal or case.num_chunks > 1 or case.balance == "pp"


@pytest.mark.full
def test_tied_embeddings_and_learned_positions(corpus: Path) -> None:
    """Gradients of tied embeddings are summed over the first and the last stage."""
    expected = run(corpus, None, 1, ONE_BY_ONE, train_one_by_one, model=CLASSIC_MODEL)
    found = run(corpus, None, 4, [*HDP, *BALANCE, *PP2, *VIRTUAL, *SHARDED], train_and_record, model=CLASSIC_MODEL)
    assert found[-1].losses == pytest.approx(expected[0].losses, rel=TOLERANCE)


@pytest.mark.full
def test_evaluation_is_that_of_one_process(corpus: Path) -> None:
    flags = ["--train-iters", 2, *"--split 60,20,20 --eval-interval 2 --eval-iters 2".split()]
    expected = run(corpus, None, 1, [*ONE_BY_ONE, *flags, "--eval-micro-batch-size", 1], train_one_by_one)
    for layout in ([], VIRTUAL):
        found = run(corpus, None, 4, [*HDP, *BALANCE, *PP2, *layout, *SHARDED, *flags], train_and_record)
        assert len(found[-1].validation_losses) == len(expected[0].validation_losses) > 0
        assert found[-1].validation_losses == pytest.approx(expected[0].validation_losses, rel=TOLERANCE)
        assert found[-1].losses == pytest.approx(expected[0].losses, rel=TOLERANCE)


@pytest.mark.full
def test_resumed_in_mid_epoch_on_other_stages(corpus: Path, tmp_path: Path) -> None:
    save, losses = tmp_path / "save", oracle_of(corpus)[0]
    common = [*HDP, *BALANCE, "--ckpt-format", "torch_dist", "--use-distributed-optimizer"]
    begun = run(corpus, save, 2, [*common, "--exit-interval", 1], train_and_record)
    assert begun[-1].losses == pytest.approx(losses[:1], rel=TOLERANCE)
    first, mean_of_two, third = losses  # Megatron's log line after the second step of a run shows the mean of two steps
    second = 2 * mean_of_two - first
    resumed = run(corpus, None, 4, [*common, *PP2, *VIRTUAL, "--load", save], train_and_record)
    assert resumed[-1].losses == pytest.approx([second, (second + third) / 2], rel=TOLERANCE)


def test_figures_are_those_of_all_stages(corpus: Path, tmp_path: Path) -> None:
    """With the same plan, two stages together count the same numbers as one stage, and each stage has a timeline."""
    rows, sums = {}, {}
    for num_stages, layout in ((1, []), (2, [*PP2, *VIRTUAL])):
        folder = tmp_path / str(num_stages)
        log = ["--hdp-log-dir", folder, "--hdp-timeline-step", 2, "--train-iters", 2, "--log-throughput"]
        flags = [*HDP, *BALANCE, "--hdp-tokens-per-rank", 128, *layout, *log]
        outcomes = run(corpus, None, 2 * num_stages, flags, train_and_record)
        rows[num_stages] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sums[num_stages] = printed(outcomes[-1], "SUMS")
        plans = [StepPlan.from_json(plan) for plan in printed(outcomes[-1], "PLAN")]
        assert sums[num_stages] == [[sum(plan.lengths), sum(n**2 for n in plan.lengths)] for plan in plans]
        assert "hdp:" in outcomes[-1].text
        assert all(" hdp: " not in outcome.text for outcome in outcomes[:-1])
    one, two = rows[1], rows[2]
    assert [row["micro_batches_per_rank"] for row in two] == [row["micro_batches_per_rank"] for row in one]
    for name in ("lm loss", "padding_share", "megabytes_sent_per_step", "attention_calls_per_step"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=TOLERANCE)
    for stage in (0, 1):
        phases = read_phases(tmp_path / "2" / "timeline" / f"stage{stage}")
        for rank, micro_batches in enumerate(plans[1].ranks):
            for kind in ("forward", "backward"):
                held = [(phase.micro_batch, tuple(shard.seq for shard in phase.shards))
                        for phase in phases if phase.rank == rank and phase.kind == kind and phase.shards]  # fmt: skip
                planned = [(index, tuple(shard.seq for shard in micro_batch.shards))
                           for index, micro_batch in enumerate(micro_batches) if micro_batch.shards]  # fmt: skip
                assert sorted(held) == sorted(2 * planned)  # once in each of two chunks
