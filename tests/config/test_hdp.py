from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.config.runs import hdp_of


def test_defaults_and_frozen() -> None:
    good = hdp_of()
    assert (good.plan_ahead, good.kernel, good.static_width, good.log_dir, good.timeline_step) == (
        2,
        None,
        None,
        None,
        None,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        good.plan_ahead = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokens_per_rank": 67, "rows_multiple": 4},
            ["--hdp-tokens-per-rank 67", "multiple of 4", "--sequence-parallel", "--fp8-format", "68"],
        ),
        ({"longest_sequence": 257}, ["--seq-length 257", "5 ranks", "there are 4", "fits is 65"]),
        ({"longest_sequence": 1000, "rows_multiple": 8}, ["fits is 256"]),
        ({"plan_ahead": 0}, ["--hdp-plan-ahead", "got 0"]),
        ({"plan_seconds": 0.0}, ["--hdp-plan-seconds", "got 0"]),
        ({"balance": "even"}, ["--hdp-balance even", "auto, none, dp, pp, bytescale"]),
        ({"num_stages": 2}, ["--hdp-balance dp", "use auto"]),
        ({"expert_ranks": 2}, ["--hdp-balance dp", "use auto"]),
        ({"global_tokens": 255}, ["--hdp-global-tokens 255", "--seq-length 256"]),
        ({"static_width": 0}, ["--hdp-static-width 0", "4 HDP ranks"]),
        ({"static_width": 3}, ["--hdp-static-width 3", "4 HDP ranks"]),
        ({"static_width": 2}, ["--seq-length 256", "--hdp-static-width 2", "--hdp-tokens-per-rank 64"]),
        ({"timeline_step": 3}, ["--hdp-timeline-step", "--hdp-log-dir"]),
    ],
)
def test_refusals_name_flag_value_and_remedy(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="--") as refusal:
        hdp_of(**changes)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("longest", [1, 255, 256, 257, 1000, 4097])
@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_the_smallest_capacity_that_a_message_names_is_accepted_and_none_below(longest: int, multiple: int) -> None:
    roomy = hdp_of(tokens_per_rank=8192, longest_sequence=longest, rows_multiple=multiple)
    smallest = roomy.smallest_capacity
    assert hdp_of(tokens_per_rank=smallest, longest_sequence=longest, rows_multiple=multiple) is not None
    with pytest.raises(ValueError, match=r"tokens.per.rank"):
        hdp_of(tokens_per_rank=smallest - multiple, longest_sequence=longest, rows_multiple=multiple)


def test_a_ring_over_all_ranks_fits_exactly() -> None:
    assert hdp_of(longest_sequence=256).smallest_capacity == 64
    assert hdp_of(static_width=4).static_width == 4


@pytest.mark.parametrize(("stages", "experts", "expected"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_slots_are_aligned_for_pipelines_and_experts(stages: int, experts: int, expected: bool) -> None:
    assert hdp_of(balance="pp", num_stages=stages, expert_ranks=experts).aligned is expected
