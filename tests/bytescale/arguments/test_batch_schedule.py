"""Growing steps: the settings of Megatron and the loader, and refused settings."""

from __future__ import annotations

import pytest

from megatron.bytescale.arguments.batch_schedule import (
    StepSizes,
    batch_schedule_of,
    ramp_sizes,
    ramp_starts,
    schedule_overrides,
)
from tests.bytescale.arguments.resolving import Resolved, resolve_lines
from tests.e2e.training import HDP, MODEL, TRAIN

COMMON = [*MODEL, *TRAIN[TRAIN.index("--clip-grad") :], "--lr", "1e-2", *HDP, "--data-path", "unread"]
RAMP = "--rampup-batch-size 4 4 25 --global-batch-size 12 --train-samples 60".split()
SCHEDULES = [
    "--step-batch-size-schedule 0:4 --train-samples 60 --global-batch-size 8".split(),
    ["--step-batch-size-schedule", "0:8 1K:4", "--train-samples", 60],
    ["--step-batch-size-schedule", "0:4 1K:6", "--train-samples", 60],
    ["--step-batch-size-schedule", "0:4 1K:8", "--train-iters", 6],
    ["--step-batch-size-schedule", "1K:8", "--train-samples", 60],
]
WORDS = ["--global-batch-size", "must not shrink", "multiple of the 4", "need --train-samples", "threshold 0"]


@pytest.fixture(scope="module")
def found() -> list[Resolved]:
    accepted = [RAMP, ["--step-batch-size-schedule", "0:4 1K:8", "--train-samples", 60]]
    return resolve_lines(*((4, [*COMMON, *words]) for words in [*accepted, *SCHEDULES]))


@pytest.mark.ranks
def test_a_ramp_becomes_the_schedule_of_megatron(found: list[Resolved]) -> None:
    """25 documents of 256 tokens are two parts of 12.5: Megatron's rule grows after 13."""
    ramp, schedule = found[:2]
    assert ramp.error is schedule.error is None
    assert ramp.args["step_batch_size_schedule"] == f"0:4 {13 * 256}:8 {25 * 256}:12"
    assert ramp.features["hdp"].schedule == ((0, 4), (13, 8), (25, 12))
    assert ramp.args["global_batch_size"] == ramp.args["eval_global_batch_size"] == 12
    assert schedule.features["hdp"].schedule == ((0, 4), (1000 // 256, 8))


@pytest.mark.ranks
def test_other_schedules_are_refused(found: list[Resolved]) -> None:
    for refused, words in zip(found[2:], WORDS, strict=True):
        assert refused.error is not None
        assert words in refused.error


@pytest.mark.parametrize("numbers", [(4, 4, 25, 10), (4, 0, 25, 12), (0, 4, 25, 12), (12, 4, 25, 12), (4, 1, 3, 12)])
def test_increments_that_lead_nowhere(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"--rampup-batch-size .* --global-batch-size {numbers[-1]} in equal"):
        ramp_sizes(*numbers)
    assert ramp_sizes(4, 2, 25, 8) == [4, 6, 8]


@pytest.mark.parametrize(("documents", "increments"), [(25, 2), (100, 3), (7, 7), (1000, 7), (360, 9), (49, 11)])
def test_a_ramp_grows_where_megatron_grows(documents: int, increments: int) -> None:
    steps = [int(consumed / (documents / increments)) for consumed in range(documents + 1)]
    assert ramp_starts(documents, increments) == [steps.index(number) for number in range(increments + 1)]


def test_without_a_schedule_nothing_changes() -> None:
    assert schedule_overrides(StepSizes(256, 8, None, None, None)) == {}
    assert batch_schedule_of(None, 256, 4) == ()
