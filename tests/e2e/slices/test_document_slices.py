"""Slices of packs and rings of documents train like one process with one document per micro-batch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import stage_parameters
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule, slice_group_size
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Slicing
from tests.e2e.pipelines import (
    FULL,
    LAYOUT,
    ONE_BY_ONE,
    SELECTIVE,
    SHARDED,
    TOLERANCE,
    UNALIGNED,
    UNEVEN,
    check_gradients,
    printed,
    run,
    train_and_record,
    train_one_by_one,
    whole_gradients,
)
from tests.e2e.training import HDP, Outcome
from tests.sample import sampled

pytestmark = pytest.mark.ranks

BALANCE = "--hdp-tokens-per-rank 128 --hdp-balance".split()
ZERO_BUBBLE = "--seq1f1b-zero-bubble"
POLICY = "--activation-policy priced --host-memory-gb 0.01 --hdp-learn-costs off --link-gb-per-second 1000".split()
STATES = [16 * stage_parameters(ModelShape(2, 32, 4, 2, 8, 48, True, 128), 1, stage == 0, stage == 1)
          for stage in range(2)]  # fmt: skip
WHOLE_DEVICE = f"{max(STATES) / 1e9 + 0.0008:.9f}"
"""Device memory in GB that leaves 0.0008 GB for activations on the fuller of two stages with two float32 layers."""

SWAPPED = "--hdp-kept-keys 150 --hdp-swapped-keys 1000 --host-memory-gb 0.01".split()
STEPS = "--train-iters 2 --split 60,20,20 --eval-interval 2 --eval-iters".split()


@dataclass(frozen=True)
class Case:
    """Number of slices (0 if the planner chooses) and layout; ``rows``: multiple of rows on a rank, as in FP8."""

    num_slices: int
    num_ranks: int
    num_stages: int
    flags: list[str] = field(default_factory=list)
    tp_size: int = 1
    num_idle: int = 0
    num_chunks: int = 1
    balance: str = "none"
    num_evaluations: int = 0
    kept_keys: str = "tokens are kept from slice to slice"
    rows: int = 1


CASES = {
    "pp2": Case(3, 4, 2, [*UNEVEN, "--hdp-kept-keys", "0"], num_evaluations=2, kept_keys="up to 0 tokens"),
    "pp2-even-full": Case(4, 4, 2, [*FULL, "--seq1f1b-partition", "even", *SWAPPED], balance="pp"),
    "pp2-one-idle": Case(2, 8, 2, SHARDED, num_idle=1),
    "pp4-eager-selective-flops": Case(3, 8, 4, [*SELECTIVE, "--seq1f1b-partition", "flops", "--seq1f1b-eager"],
                                      balance="pp"),
    "tp2-pp2": Case(5, 8, 2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *UNALIGNED], tp_size=2,
                    balance="bytescale", rows=16),
    "pp1": Case(2, 2, 1, FULL),
    "pp2-kept-keys": Case(4, 4, 2, ["--hdp-kept-keys", "150"], balance="pp", kept_keys="up to 150 tokens"),
    "pp2-zero-bubble": Case(3, 4, 2, [ZERO_BUBBLE, *UNALIGNED], num_evaluations=2),
    "pp2-zero-bubble-whole": Case(1, 4, 2, [ZERO_BUBBLE], balance="pp", kept_keys="a stage holds up to 2 slices"),
    "pp2-chosen-policy": Case(0, 4, 2, [*POLICY, "--device-memory-gb", WHOLE_DEVICE], balance="pp",
                              kept_keys="shares follow from the slices of each step"),
    "pp2-swapped-policy": Case(3, 4, 2, [*SWAPPED, "--swap-fraction", "0.5", "--seq1f1b-eager", *UNALIGNED],
                               num_evaluations=2),
    "pp4-virtual": Case(3, 8, 4, [*LAYOUT[:-1], *UNALIGNED], num_chunks=2, num_evaluations=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Return losses, validation losses and gradients of the first step of one process."""
    save = tmp_path_factory.mktemp("oracle")
    outcome = run(corpus, save, 1, [*ONE_BY_ONE, *STEPS, 2, "--eval-micro-batch-size", 1], train_one_by_one)[0]
    return outcome, whole_gradients(save, 1, 1)[0]


@pytest.mark.parametrize("name", sampled(CASES, ["pp2-even-full"]))
def test_losses_and_gradients_are_those_of_one_process(
    name: str, corpus: Path, oracle: tuple[Outcome, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    case = CASES[name]
    flags = [*HDP, *BALANCE, case.balance, "--pipeline-model-parallel-size", case.num_stages,
             "--seq1f1b-slices", case.num_slices or "auto", *case.flags, *STEPS, case.num_evaluations]  # fmt: skip
    entry = partial(train_with_rows, case.rows, case.num_idle)
    outcomes = run(corpus, tmp_path, case.num_ranks, flags, entry)
    assert outcomes[-1].losses == pytest.approx(oracle[0].losses, rel=TOLERANCE)
    if case.num_evaluations:
        assert outcomes[-1].validation_losses == pytest.approx(oracle[0].validation_losses, rel=TOLERANCE)
        assert outcomes[-1].validation_losses
    assert case.kept_keys in outcomes[0].text
    assert any(sum(printed(one, "SWAPPED")) for one in outcomes) == ("--hdp-swapped-keys" in case.flags)
    check_order(case, outcomes)
    check_gradients(case, tmp_path, oracle[1])
    padding = [float(share) for share in re.findall(r"padding ([\d.]+)%", outcomes[-1].text)]
    assert len(padding) == len(outcomes[-1].losses)
    assert all(share > 10 for share in padding) == (case.rows > 1)  # slices of 20 to 30 tokens on a rank


def train_with_rows(rows: int, num_idle: int) -> None:
    """Entry that pads micro-batches and slices to a multiple of ``rows`` on each tensor-parallel rank, as FP8 does."""
    from megatron.bytescale.features.fp8 import Fp8Options

    Fp8Options.rows = rows  # type: ignore[method-assign,assignment]
    train_and_record(num_idle)


def check_order(case: Case, outcomes: list[Outcome]) -> None:
    """Every stage ran the schedule of its pipeline, and some micro-batch contained both a ring and a pack."""
    per_stage = case.num_ranks // case.num_stages
    widths = set()
    for process, outcome in enumerate(outcomes):
        stage, hdp_rank = process // per_stage, process % per_stage // case.tp_size
        plans, actions = ([StepPlan.from_json(plan) for plan in printed(outcome, "PLAN")], printed(outcome, "ACTIONS"))
        assert len(plans) == len(actions) == 2
        for plan, done in zip(plans, actions, strict=True):
            assert (plan.slicing is None) == bool(case.num_slices)
            orders = {"eager": "--seq1f1b-eager" in case.flags, "zero_bubble": ZERO_BUBBLE in case.flags}
            slicing = plan.slicing or Slicing(case.num_slices, **orders)
            group = slice_group_size(case.num_stages, slicing.num_slices) // slicing.num_slices
            count = micro_batch_counts(plan, multiple=group if case.num_chunks > 1 else 1)[hdp_rank]
            schedule = seq1f1b_schedule(case.num_stages, count, slicing, case.num_chunks)
            expected = [(one.kind, one.micro_batch * slicing.num_slices + one.slice_index, one.chunk)
                        for one in schedule.stages[stage]]  # fmt: skip
            assert [tuple(one) for one in done] == expected
            widths |= {tuple(sorted({len(shard.ring) for shard in held.shards})) for held in plan.ranks[hdp_rank]}
    assert any(max(one, default=1) > 1 for one in widths)
    assert any(1 in one for one in widths)
