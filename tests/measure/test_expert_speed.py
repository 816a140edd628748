"""Constants of the placement's cost model, with a clock that the tests control. No test depends on real time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.measure import expert_speed, speeds
from bytescale_ext.measure.expert_speed import (
    LENGTHS_ON_CUDA,
    REPEATS,
    ExpertSize,
    agreed_cost,
    all_to_all_seconds,
    link_seconds,
    timed_token_counts,
    token_seconds,
)
from bytescale_ext.measure.speeds import Timer
from bytescale_ext.plan.experts.cost import ExpertCost
from tests.harness import run_ranks

CPU = torch.device("cpu")


class Clock:
    """Clock with the given seconds of computations."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        return self.now

    def compute(self, num_tokens: int) -> None:
        self.now += self.seconds[num_tokens]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({100: 5.0, 400: 11.0}, 0.02),  # 3 seconds to start, for any number of tokens
        ({100: 6.0, 400: 4.0}, 0.01),  # noise
        ({100: 4.0, 400: 4.0}, 0.01),
    ],
    ids=["grows", "shrinks", "stays"],
)
def test_seconds_of_a_token_are_those_by_which_computing_grows(seconds: dict[int, float], expected: float) -> None:
    clock = Clock(seconds)
    assert token_seconds(clock.compute, (100, 400), Timer(clock, budget=1e9)) == pytest.approx(expected)


def exchange_parts(rank: int, world: int) -> tuple[list[tuple[list[int], list[int]]], float]:
    """Exchange with a clock of 8, 7, 6, ... seconds; return the messages and the measured seconds."""
    seen: list[tuple[list[int], list[int]]] = []
    times = iter([0.0, 8.0] + [value for left in range(7, 0, -1) for value in (0.0, float(left))])
    works = dist.all_to_all_single

    def noted(arrived: torch.Tensor, given: torch.Tensor, of: list[int], to: list[int], group: object) -> None:
        seen.append((of, to))
        works(arrived, given, of, to, group=group)

    dist.all_to_all_single = noted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds.time, "perf_counter", lambda: next(times))
        return seen, all_to_all_seconds(dist.group.WORLD, [0, 5, 3], CPU)


@pytest.mark.ranks
def test_each_rank_sends_to_those_after_it() -> None:
    ranks = run_ranks(exchange_parts, 3)
    to = [[0, 5, 3], [3, 0, 5], [5, 3, 0]]
    of = [[0, 3, 5], [5, 0, 3], [3, 5, 0]]
    for rank, (seen, seconds) in enumerate(ranks):
        assert seen == [(of[rank], to[rank])] * (1 + REPEATS)
        assert seconds == 8.0 - REPEATS, "the best, without the first"


def test_links_are_measured_by_bytes_and_whole_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def seconds(group: object, sent: list[int], device: torch.device) -> float:
        asked.append(sent)
        return 1e-6 * sum(sent)

    class Group:
        def size(self) -> int:
            return 4

    monkeypatch.setattr(expert_speed, "all_to_all_seconds", seconds)
    size = ExpertSize(weights=1000, width=64, element_bytes=2)
    tokens, weights = link_seconds(size, Group(), CPU)  # type: ignore[arg-type]
    part = expert_speed.MESSAGE_BYTES // 3
    assert asked == [[0, part, part, part], [0, 2000, 0, 0]]
    assert tokens == pytest.approx(1e-6 * 64 * 2)
    assert weights == pytest.approx(1e-6 * 2000)


def slowest(rank: int, world: int) -> ExpertCost:
    """The last rank has no experts."""
    seconds = [(1.0, 5.0, 3.0), (2.0, 4.0, 1.0), (0.0, 0.0, 0.0)][rank]
    return agreed_cost(seconds, CPU)


@pytest.mark.ranks
def test_the_slowest_rank_counts_everywhere() -> None:
    assert run_ranks(slowest, 3) == [ExpertCost(2.0, 5.0, 3.0)] * 3


def test_numbers_of_timed_tokens() -> None:
    """On CPU the larger number keeps a pass short."""
    assert timed_token_counts(1 << 30, on_cuda=True) == LENGTHS_ON_CUDA
    assert timed_token_counts(1 << 30, on_cuda=False) == (16, 64)
    assert timed_token_counts(1, on_cuda=False) == (256, 1024)
