"""Server and scheduler without Ray: caches, back-pressure, one plan for all clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data import remote
from bytescale_ext.data.epochs import EpochOrder
from bytescale_ext.data.lengths import sample_table
from bytescale_ext.data.remote_lines import LineIndex, index_lines
from bytescale_ext.data.remote_scheduler import FileSamples, PlannedStep, SplitSamples, StepScheduler, server_of
from bytescale_ext.data.remote_server import PLACE, TokenCache, TokenServer
from bytescale_ext.data.texts import encoder
from bytescale_ext.plan.hdp import plan_naive
from bytescale_ext.plan.shapes import StepPlan
from tests.data.text_files import SEED, LocalText, write_text

SEQ_LENGTH = 64


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "a.jsonl", 80)


def samples_of(path: Path, num_epochs: int = 1) -> tuple[SplitSamples, tuple[LineIndex]]:
    index = index_lines(str(path), 0, 1 << 40, "text", SEQ_LENGTH, encoder(None))
    table = sample_table(index.table_lengths, SEQ_LENGTH)
    rows = FileSamples(0, table.document, table.start, EpochOrder(len(table), SEED, 0))
    return SplitSamples(num_epochs * len(table), (rows,)), (index,)


def server(path: Path, limit_tokens: int = 1 << 20, **options: Any) -> TokenServer:
    settings = {"key": "text", "longest": SEQ_LENGTH, "build_encode": partial(encoder, None), **options}
    return TokenServer([str(path)], limit_tokens=limit_tokens, **settings)  # type: ignore[arg-type]


def test_a_cache_holds_the_latest_and_never_more_than_its_limit() -> None:
    cache = TokenCache(10)
    for key, size in enumerate((4, 5, 3, 11, 2)):
        cache.put((0, key), np.zeros(size))
        assert cache.held_tokens <= 10
        cache.get((0, 1))
    assert [key for key in range(5) if cache.get((0, key)) is not None] == [1, 2, 4]
    assert (cache.held_tokens, cache.peak_tokens) == (10, 10)


@pytest.mark.parametrize("limit_tokens", [1, 200, 1 << 20])
def test_a_server_gives_the_tokens_of_the_local_loader(text: Path, limit_tokens: int) -> None:
    local, one = LocalText(text, SEQ_LENGTH), server(text, limit_tokens)
    samples, indices = samples_of(text)
    places = samples.places(np.arange(len(local)), indices)
    lengths = one.lengths(places)
    assert lengths.tolist() == [local.length(i) for i in range(len(local))]
    for past_end in (0, 1):
        ranges = np.stack([lengths // 3, lengths + past_end], axis=1)
        tokens, counts = one.read(places, ranges)
        expected = [local.read(i, start, stop) for i, (start, stop) in enumerate(ranges.tolist())]
        assert counts.tolist() == [len(part) for part in expected]
        assert tokens.tolist() == np.concatenate(expected).tolist()
    assert one.held_tokens()[1] <= limit_tokens


def test_documents_unlike_their_index_are_refused(text: Path) -> None:
    samples, indices = samples_of(text)
    places = samples.places(np.arange(samples.num_samples), indices)
    counted = places[places["is_counted"]][:1]
    text.write_bytes(text.read_bytes().replace(b"a", b" a"))
    with pytest.raises(ValueError, match="was changed|not JSON"):
        server(text).lengths(counted)

    def doubled(raw: bytes) -> tuple[np.ndarray, bool]:
        return np.zeros(2 * len(raw), dtype=np.int64), True

    one = np.zeros(1, dtype=PLACE)
    text.write_text('{"text": "' + "a" * 40 + '"}\n')
    one["num_bytes"] = text.stat().st_size
    with pytest.raises(ValueError, match="document 0 has 80 tokens and a text of fewer bytes.*--hdp-loader local"):
        server(text, build_encode=lambda: doubled).lengths(one)
    text.unlink()
    with pytest.raises(ValueError, match="a.jsonl: cannot read .*every machine"):
        server(text).lengths(one)


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
    """A server as the scheduler sees it, in this process; counts its calls."""

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
    return StepScheduler(servers, {"train": samples}, indices, make_plan, num_clients, limit_tokens, share, **options)


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
    """Clients that run ahead wait for the slowest; nobody waits for ever."""
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
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == steps
    # The oldest step is always admitted, beside one that was admitted before it within the limit.
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
    """For room that a slow client holds, and for a step that takes its time; asked again, it gets the same step."""
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
        assert await one.plan_step(0, "train", 1, 4, 4) == []  # there is room for one step, which client 1 holds
        waiting = asyncio.create_task(one.plan_step(1, "train", 1, 4, 4))
        assert (await one.plan_step(0, "train", 1, 4, 4))[0] is (await waiting)[0]

    asyncio.run(run())


class Ray:
    """Stands in for the module: ``get`` of a function calls it; None is an answer that never comes."""

    exceptions = SimpleNamespace(
        GetTimeoutError=type("GetTimeoutError", (TimeoutError,), {}),
        RayTaskError=type("RayTaskError", (Exception,), {}),
        ObjectLostError=type("ObjectLostError", (Exception,), {}),
    )

    def get(self, reference: Any, timeout: float) -> Any:
        if reference is None:
            time.sleep(0.001)
            raise self.exceptions.GetTimeoutError
        return reference()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(remote, "_ray", lambda: ray)
    for name in ("_PATIENCE_SECONDS", "_SHARED_SECONDS"):
        monkeypatch.setattr(remote, name, 0.01)
    return ray


def test_an_answer_that_does_not_come_is_asked_for_again_and_then_an_error(impatient: Ray) -> None:
    answers = iter([None, None, lambda: 7])
    assert remote.fetch_answers([lambda: next(answers), lambda: lambda: 8]) == [7, 8]
    calls: list[None] = []
    with pytest.raises(TimeoutError, match="no answer from an actor for 0.01 s"):
        remote.fetch_answers([lambda: calls.append(None)])
    assert len(calls) == 5
    with pytest.raises(RuntimeError, match="the loader is closed"):
        remote.fetch_answers([lambda: None], should_stop=lambda: True)


def test_a_lost_value_is_asked_for_again_and_then_an_error(impatient: Ray) -> None:
    def lost() -> None:
        raise impatient.exceptions.ObjectLostError

    answers = iter([[lost], [None], [], [lambda: 7]])
    assert remote.fetch_shared(lambda: lambda: next(answers)) == 7
    with pytest.raises(impatient.exceptions.ObjectLostError):
        remote.fetch_shared(lambda: lambda: [lost])
    with pytest.raises(TimeoutError):
        remote.fetch_shared(lambda: lambda: [None])


def test_samples_go_on_at_the_start_of_a_split(text: Path) -> None:
    local = LocalText(text, SEQ_LENGTH, num_epochs=2)

    async def run() -> PlannedStep:
        one = scheduler(text, [Direct(server(text))], 1, 1 << 20)
        step: PlannedStep = (await one.plan_step(0, "train", 7, len(local) - 2, 4))[0]
        return step

    assert asyncio.run(run()).plan.lengths == tuple(
        local.length(i % len(local)) for i in range(len(local) - 2, len(local) + 2)
    )
