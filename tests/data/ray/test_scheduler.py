"""Scheduler without Ray: one plan for all clients, and back-pressure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.ray.scheduler import (
    FileSamples,
    Limits,
    PlannedStep,
    Samples,
    SplitSamples,
    StepScheduler,
    server_of,
)
from bytescale_ext.data.ray.server import TokenServer
from bytescale_ext.plan.step.plan import StepPlan
from tests.data.ray.files import SEQ_LENGTH, samples_of, server
from tests.data.text_files import LocalText, write_text
from tests.plan.simple_plans import plan_naive


def test_a_blend_takes_each_sample_from_its_part(tmp_path: Path) -> None:
    paths = [write_text(tmp_path / f"{n}.jsonl", 30, seed=n) for n in range(2)]
    parts = [samples_of(path) for path in paths]
    files = tuple(
        FileSamples(n, part.files[0].documents, part.files[0].starts, part.files[0].order)
        for n, (part, _) in enumerate(parts)
    )
    which, inner = np.array([1, 0, 1, 1, 0], dtype=np.int16), np.array([0, 0, 1, 2, 1])
    places = SplitSamples(5, files, which, inner).places(np.array([4, 2, 0]), [part[1][0] for part in parts])
    assert places["file"].tolist() == [0, 1, 1]
    alone = [parts[n][0].places(np.array([i]), parts[n][1])[0] for n, i in ((0, 1), (1, 1), (1, 0))]
    assert [place["offset"] for place in alone] == places["offset"].tolist()


class Direct:
    """Fake server in this process that counts its calls."""

    def __init__(self, inner: TokenServer) -> None:
        self.inner, self.calls = inner, 0
        self.lengths = self

    async def remote(self, places: np.ndarray) -> np.ndarray:
        self.calls += 1
        await asyncio.sleep(0)
        return self.inner.lengths(places)


def planned(lengths: tuple[int, ...]) -> tuple[StepPlan, bool]:
    return plan_naive(lengths, 2, SEQ_LENGTH), False


def scheduler(
    text: Path,
    servers: list[Direct],
    num_clients: int,
    limit_tokens: int,
    make_plan: Callable[..., Any] = planned,
    **options: Any,
) -> StepScheduler:
    samples, indices = samples_of(text, num_epochs=2)
    share: Callable[[PlannedStep], PlannedStep] = lambda step: step  # noqa: E731
    limits = Limits(num_clients, limit_tokens, **options)
    return StepScheduler(servers, Samples({"train": samples}, indices), make_plan, limits, share)


def test_a_step_is_planned_once_for_all_clients_and_the_next_one_ahead(text: Path) -> None:
    local = LocalText(text, SEQ_LENGTH, num_epochs=2)

    async def run() -> None:
        servers = [Direct(server(text)) for _ in range(2)]
        one = scheduler(text, servers, 3, 1 << 20)
        steps = [(await one.plan_step(client, "train", 0, 0, 8))[0] for client in range(3)]
        assert steps[0] is steps[1] is steps[2]
        assert steps[0].plan.lengths == tuple(local.length(i) for i in range(8))
        assert set(server_of(steps[0].places, 2)) == {0, 1}
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert [one_server.calls for one_server in servers] == [2, 2]
        await one.plan_step(0, "train", 1, 8, 8)
        assert [one_server.calls for one_server in servers] <= [3, 3]

    asyncio.run(run())


@pytest.mark.parametrize("limit_tokens", [1, 900, 2000])
def test_back_pressure_bounds_what_is_under_way(text: Path, limit_tokens: int) -> None:
    """Clients that run ahead wait for the slowest client, and every wait ends."""
    steps, count = 16, 6

    async def client(one: StepScheduler, number: int, seen: list[int]) -> None:
        for step in range(steps):
            (planned_step,) = await asyncio.wait_for(one.plan_step(number, "train", step, step * count, count), 20)
            seen.append(sum(planned_step.plan.lengths))
            for _ in range(number * 3):
                await asyncio.sleep(0)

    async def run() -> tuple[int, list[list[int]]]:
        one = scheduler(text, [Direct(server(text))], 3, limit_tokens)
        seen: list[list[int]] = [[] for _ in range(3)]
        await asyncio.gather(*(client(one, number, seen[number]) for number in range(3)))
        return (await one.held_tokens())[1], seen

    peak, seen = asyncio.run(run())
    samples, indices = samples_of(text, num_epochs=2)
    bounds = [int(samples.places(np.arange(count) + i * count, indices)["tokens"].sum()) for i in range(steps)]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == steps
    # The oldest step is always admitted, in addition to a step that was admitted before it within the limit.
    assert peak <= max(max(bounds), limit_tokens) + (max(bounds) if limit_tokens < max(bounds) else 0)
    assert peak < sum(bounds)


def test_a_failed_step_is_tried_again(text: Path) -> None:
    failures = [ValueError("no plan")]

    def fails_once(lengths: tuple[int, ...]) -> tuple[StepPlan, bool]:
        if failures:
            raise failures.pop()
        return planned(lengths)

    async def run() -> None:
        one = scheduler(text, [Direct(server(text))], 1, 1 << 20, fails_once)
        with pytest.raises(ValueError, match="no plan"):
            await one.plan_step(0, "train", 0, 0, 4)
        assert (await one.plan_step(0, "train", 0, 0, 4))[0].plan.num_ranks == 2

    asyncio.run(run())


def test_a_call_that_would_wait_for_long_is_told_to_ask_again(text: Path) -> None:
    """Waits for room, and for a slow step, return an empty list. A repeated call gets the same step."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(lengths: tuple[int, ...]) -> tuple[StepPlan, bool]:
        begun.set()
        assert go_on.wait(20)
        return planned(lengths)

    async def run() -> None:
        one = scheduler(text, [Direct(server(text))], 2, 1, slow, wait_seconds=0.05)
        assert await one.plan_step(0, "train", 0, 0, 4) == []
        assert begun.is_set()
        go_on.set()
        steps = [await one.plan_step(client, "train", 0, 0, 4) for client in (0, 1) for _ in range(9)]
        assert len({id(step) for (step,) in filter(None, steps)}) == 1
        assert await one.plan_step(0, "train", 1, 4, 4) == []  # there is room for one step, which client 1 still needs
        waiting = asyncio.create_task(one.plan_step(1, "train", 1, 4, 4))
        assert (await one.plan_step(0, "train", 1, 4, 4))[0] is (await waiting)[0]

    asyncio.run(run())


def test_samples_go_on_at_the_start_of_a_split(text: Path) -> None:
    local = LocalText(text, SEQ_LENGTH, num_epochs=2)

    async def run() -> PlannedStep:
        one = scheduler(text, [Direct(server(text))], 1, 1 << 20)
        step: PlannedStep = (await one.plan_step(0, "train", 7, len(local) - 2, 4))[0]
        return step

    assert asyncio.run(run()).plan.lengths == tuple(
        local.length(i % len(local)) for i in range(len(local) - 2, len(local) + 2)
    )
