"""Pipelines under hybrid data parallelism train as one process does that sees the same documents one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.schedule import micro_batch_counts, stage_actions
from bytescale_ext.plan.shapes import StepPlan
from bytescale_ext.timeline import read_spans
from tests.e2e.test_features import CLASSIC_MODEL
from tests.e2e.training import (
    HDP,
    MODEL,
    TRAIN,
    Outcome,
    draw_weights_by_name,
    relative_error,
    shard_of,
    train_documents_one_by_one,
    train_ranks,
    write_documents,
)

TOLERANCE = 1e-5
STEPS = 4
LAYERS = ["--num-layers", 4, "--train-iters", STEPS]
ONE_BY_ONE = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
BALANCE = "--hdp-balance none --hdp-tokens-per-rank 128".split()
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
UNALIGNED = [*SHARDED, "--no-align-grad-reduce"]
PP2 = "--pipeline-model-parallel-size 2".split()
PP4 = "--pipeline-model-parallel-size 4".split()
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2".split()


def train_and_record(num_idle: int = 0) -> None:
    """An entry: train from weights drawn by name and note what each stage runs; the last ranks have no tokens."""
    import pretrain_gpt_hdp
    from bytescale_ext.plan.planner import HdpPlanner

    plan = HdpPlanner.__call__

    def plan_and_idle(planner: HdpPlanner, lengths: Any, should_stop: Any = None) -> StepPlan:
        made = plan(replace(planner, num_ranks=planner.num_ranks - num_idle), lengths, should_stop)
        assert isinstance(made.ranks, PlacedRanks)
        return replace(made, num_ranks=planner.num_ranks, ranks=replace(made.ranks, num_ranks=planner.num_ranks))

    if num_idle:
        HdpPlanner.__call__ = plan_and_idle  # type: ignore[method-assign]
    record_actions()
    draw_weights_by_name()
    pretrain_gpt_hdp.main()


def train_one_by_one() -> None:
    """An entry: the oracle, with the same weights."""
    draw_weights_by_name()
    train_documents_one_by_one()


def record_actions() -> None:
    """Print each step's plan, what Megatron's schedule ran of it on this stage, and what its FLOP counter took."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from megatron.bytescale.core.pipeline_parallel import schedules as ours

    forward_step, backward_step = schedules.forward_step, schedules.backward_step
    end_step, consume = ours.end_step, training.consume_seqlen_stats_in_iteration
    done: list[tuple[str, int, int]] = []
    of_output: dict[int, tuple[int, int]] = {}

    def forward_and_note(*args: Any, current_microbatch: int = 0, vp_stage: int | None = None, **kwargs: Any) -> Any:
        result = forward_step(*args, current_microbatch=current_microbatch, vp_stage=vp_stage, **kwargs)
        of_output[id(result[0])] = (current_microbatch, vp_stage or 0)
        done.append(("F", *of_output[id(result[0])]))
        return result

    def backward_and_note(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        done.append(("B", *of_output[id(output_tensor)]))
        return backward_step(input_tensor, output_tensor, *args)

    def end_and_print(runtime: Any, training: bool) -> None:
        if training:
            print(f"ACTIONS {json.dumps(done)}")
            print(f"PLAN {json.dumps(runtime.step.plan.to_json())}")
        done.clear()
        end_step(runtime, training)

    def consume_and_print() -> Any:
        sums = consume()
        print(f"SUMS {json.dumps(sums)}")
        return sums

    schedules.forward_step, schedules.backward_step = forward_and_note, backward_and_note
    ours.end_step = end_and_print
    training.consume_seqlen_stats_in_iteration = consume_and_print


def printed(outcome: Outcome, name: str) -> list[Any]:
    return [json.loads(line) for line in re.findall(rf"^{name} (.*)$", outcome.text, re.MULTILINE)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs")


def run(
    corpus: Path, save: Path | None, num_ranks: int, flags: Iterable[object], entry: Any, model: list[str] = MODEL
) -> list[Outcome]:
    words = list(flags)
    saving = ["--save", save, "--save-wgrads-interval", 1] if save else []
    tp_size = words[words.index("--tensor-model-parallel-size") + 1] if "--tensor-model-parallel-size" in words else 1
    common = [*model, *TRAIN, *LAYERS, "--data-path", corpus, *saving,
              "--make-vocab-size-divisible-by", 128 // int(str(tp_size))]  # fmt: skip
    return train_ranks(num_ranks, *common, *words, entry=entry)


@pytest.fixture(scope="module")
def oracle(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the first gradients of one process."""
    save = tmp_path_factory.mktemp("oracle")
    losses = run(corpus, save, 1, ONE_BY_ONE, train_one_by_one)[0].losses
    return losses, whole_gradients(save, 1, 1)[0]


def whole_gradients(save: Path, num_stages: int, tp_size: int) -> list[dict[str, torch.Tensor]]:
    """The first step's gradients of each tensor-parallel rank, all stages and chunks together, by name in the whole."""
    folder = save / "wgrads" / "iter_0000001"
    return [_whole_gradients(folder, num_stages, tp_rank) for tp_rank in range(tp_size)]


def _whole_gradients(folder: Path, num_stages: int, tp_rank: int) -> dict[str, torch.Tensor]:
    names = [f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if num_stages > 1 else "") for stage in range(num_stages)]
    stages = [torch.load(next(iter(folder.glob(f"{name}*"))), weights_only=False) for name in names]
    num_layers, whole = 0, {}
    for chunk in range(max(map(len, stages))):
        for stage in stages:
            of_chunk = stage.get(f"model_chunk{chunk}", {})
            local = [int(found[1]) for name in of_chunk if (found := re.match(r"decoder\.layers\.(\d+)\.", name))]
            for name, gradient in of_chunk.items():
                shift = lambda found, offset=num_layers: f"layers.{int(found[1]) + offset}."  # noqa: E731
                whole[re.sub(r"layers\.(\d+)\.", shift, name)] = gradient
            num_layers += max(local, default=-1) + 1
    return whole


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
SELECTIVE = ["--recompute-granularity", "selective"]
LAYOUT = "--pipeline-model-parallel-layout E|t|t||t||t|L --no-overlap-p2p-communication".split()
UNEVEN = "--decoder-first-pipeline-num-layers 3".split()


@dataclass(frozen=True)
class Case:
    """One layout of 4 layers over stages, virtual stages, HDP ranks and tensor-parallel ranks."""

    num_ranks: int
    num_stages: int
    flags: list[str]
    num_chunks: int = 1
    tp_size: int = 1
    num_idle: int = 0
    balance: str = "none"


CASES = {
    "pp2": Case(4, 2, UNEVEN),
    "pp2-sharded-full": Case(4, 2, [*UNALIGNED, *FULL], balance="pp"),
    "pp2-one-idle": Case(8, 2, SHARDED, num_idle=1),
    "pp4-selective": Case(8, 4, SELECTIVE, balance="pp"),
    "tp2-pp2": Case(8, 2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *UNALIGNED], tp_size=2,
                    balance="bytescale"),
    "pp2-virtual-full": Case(4, 2, [*VIRTUAL, *SHARDED, *FULL, "--overlap-p2p-communication-warmup-flush"], 2),
    "pp2-virtual-group": Case(
        4, 2, [*VIRTUAL, *UNALIGNED, "--microbatch-group-size-per-virtual-pipeline-stage", "3"], 2,
        balance="pp"),
    "pp4-virtual-layout": Case(8, 4, [*LAYOUT, *UNALIGNED], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(
    name: str, corpus: Path, oracle: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    case = CASES[name]
    flags = [
        *HDP,
        *BALANCE,
        "--hdp-balance",
        case.balance,
        "--pipeline-model-parallel-size",
        case.num_stages,
        *case.flags,
    ]
    outcomes = run(corpus, tmp_path, case.num_ranks, flags, partial(train_and_record, case.num_idle))
    assert outcomes[-1].losses == pytest.approx(oracle[0], rel=TOLERANCE)
    check_order(case, outcomes)
    check_gradients(case, tmp_path, oracle[1])


def check_gradients(case: Any, save: Path, expected: dict[str, torch.Tensor]) -> None:
    """Those of the first step, of all stages and tensor-parallel ranks, are the expected ones of the whole model."""
    if "--use-distributed-optimizer" in case.flags and "--no-align-grad-reduce" not in case.flags:
        return  # Megatron then leaves each rank the reduced gradients of its own shard only, also where it saves them
    for tp_rank, found in enumerate(whole_gradients(save, case.num_stages, case.tp_size)):
        assert {key for key in found if "_extra" not in key} == set(expected)
        for key, value in found.items():
            error = relative_error(value, shard_of(expected[key], key, value, tp_rank, case.tp_size))
            assert error < TOLERANCE, f"{key}: {error=}"


def check_order(case: Case, outcomes: list[Outcome]) -> None:
    """Every stage ran what ``stage_actions`` says of its pipeline's number of micro-batches, and pipelines differed."""
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
            expected = stage_actions(counts[hdp_rank], stage, case.num_stages, case.num_chunks, group)
            assert [tuple(one) for one in done] == list(expected)
            unequal |= len(set(counts)) > 1
            assert not case.num_idle or not plan.ranks[-1]
    assert unequal or case.num_chunks > 1 or case.balance == "pp"


def test_tied_embeddings_and_learned_positions(corpus: Path) -> None:
    """Their gradients are summed over the first and the last stage."""
    expected = run(corpus, None, 1, ONE_BY_ONE, train_one_by_one, model=CLASSIC_MODEL)
    found = run(corpus, None, 4, [*HDP, *BALANCE, *PP2, *VIRTUAL, *SHARDED], train_and_record, model=CLASSIC_MODEL)
    assert found[-1].losses == pytest.approx(expected[0].losses, rel=TOLERANCE)


def test_evaluation_is_that_of_one_process(corpus: Path) -> None:
    flags = ["--train-iters", 2, *"--split 60,20,20 --eval-interval 2 --eval-iters 2".split()]
    expected = run(corpus, None, 1, [*ONE_BY_ONE, *flags, "--eval-micro-batch-size", 1], train_one_by_one)
    for layout in ([], VIRTUAL):
        found = run(corpus, None, 4, [*HDP, *BALANCE, *PP2, *layout, *SHARDED, *flags], train_and_record)
        assert len(found[-1].validation_losses) == len(expected[0].validation_losses) > 0
        assert found[-1].validation_losses == pytest.approx(expected[0].validation_losses, rel=TOLERANCE)
        assert found[-1].losses == pytest.approx(expected[0].losses, rel=TOLERANCE)


def test_resumed_in_mid_epoch_on_the_same_and_on_other_stages(
    corpus: Path, oracle: tuple[list[float], Any], tmp_path: Path
) -> None:
    save = tmp_path / "save"
    common = [
        *HDP,
        *BALANCE,
        "--ckpt-format",
        "torch_dist",
        "--use-distributed-optimizer",
        "--hdp-tokens-per-rank",
        128,
    ]
    begun = run(corpus, save, 4, [*common, *PP2, *VIRTUAL, "--exit-interval", 2], train_and_record)
    assert begun[-1].losses == pytest.approx(oracle[0][:2], rel=TOLERANCE)
    for num_ranks, layout in ((4, [*PP2, *VIRTUAL]), (2, [])):
        flags = [*common, *layout, "--load", save]
        resumed = run(corpus, None, num_ranks, flags, train_and_record)
        mean_of_two = sum(oracle[0][2:4]) / 2  # what Megatron's line after the second step of a run shows
        assert resumed[-1].losses == pytest.approx([oracle[0][2], mean_of_two], rel=TOLERANCE)


def test_figures_are_those_of_all_stages(corpus: Path, tmp_path: Path) -> None:
    """With the same plan, two stages together count what one stage counts; each stage has a timeline."""
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
        spans = read_spans(tmp_path / "2" / "timeline" / f"stage{stage}")
        for rank, micro_batches in enumerate(plans[1].ranks):
            for kind in ("forward", "backward"):
                held = [(span.micro_batch, tuple(shard.seq for shard in span.shards))
                        for span in spans if span.rank == rank and span.kind == kind and span.shards]  # fmt: skip
                planned = [(index, tuple(shard.seq for shard in micro_batch.shards))
                           for index, micro_batch in enumerate(micro_batches) if micro_batch.shards]  # fmt: skip
                assert sorted(held) == sorted(2 * planned)  # once through each of two chunks
