"""Scheduler of the remote loader: it orders the samples and plans each step. Runs as a Ray actor.

::

    client: plan_step(first sample) --> places of the samples --> servers: lengths --> planner, check --> PlannedStep

A step is planned once for all clients. Then the next step starts, so servers tokenize ahead of the clients. A step
starts when the tokens of all unfinished steps fit the servers' caches; the oldest step always starts, so that training
continues under any limit. A restarted scheduler rebuilds its state from the clients' calls. A call that has waited long
returns an empty list, and the client repeats it. So a missing answer always means a failure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bytescale_ext.data.ray.fetching import Reference, RemoteMethod
from bytescale_ext.data.ray.lines import LineIndex
from bytescale_ext.data.ray.server import PLACE
from bytescale_ext.data.samples.epochs import SampleOrder
from bytescale_ext.plan.step.numbers import Numbers
from bytescale_ext.plan.step.plan import StepPlan

_TOKENIZE_SECONDS = 600.0

MakePlan = Callable[[Sequence[int]], tuple[StepPlan, bool]]
"""Function from lengths to (checked plan, whether it is the simple plan)."""

_Key = tuple[str, int, int, int]  # split, number of the step, first sample, number of samples


@dataclass(frozen=True, eq=False, slots=True)
class FileSamples:
    """Samples of one split of one file.

    Attributes:
        file: number of the file.
        documents: document of each row of the sample table, [num_rows].
        starts: first token of each row in its document, [num_rows].
        order: order of the rows over all epochs.
    """

    file: int
    documents: np.ndarray
    starts: np.ndarray
    order: SampleOrder


@dataclass(frozen=True, eq=False, slots=True)
class SplitSamples:
    """Samples of one split of one file, or of a blend of several files.

    Attributes:
        num_samples: number of samples of all epochs.
        files: samples of each file.
        part: index in ``files`` of each sample of a blend, [num_samples]; None for a single file.
        inner: number of each sample of a blend in its file, [num_samples]; None for a single file.
    """

    num_samples: int
    files: tuple[FileSamples, ...]
    part: np.ndarray | None = None
    inner: np.ndarray | None = None

    def places(self, samples: np.ndarray, indices: Sequence[LineIndex]) -> np.ndarray:
        """Return the location of each sample: ``PLACE`` [len(samples)]."""
        places = np.zeros(len(samples), dtype=PLACE)
        parts = np.zeros(len(samples), dtype=np.int64) if self.part is None else self.part[samples]
        inner = samples if self.inner is None else self.inner[samples]
        for number in np.unique(parts):
            in_part, file = parts == number, self.files[number]
            rows = file.order.rows(inner[in_part])
            documents, index = file.documents[rows], indices[file.file]
            places["file"][in_part], places["start"][in_part] = file.file, file.starts[rows]
            places["document"][in_part] = documents
            places["offset"][in_part] = index.offsets[documents]
            places["num_bytes"][in_part] = index.num_bytes[documents]
            places["tokens"][in_part] = index.tokens[documents]
            places["is_counted"][in_part] = index.is_counted[documents]
        return places


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """All samples of a run.

    Attributes:
        splits: samples of each split, by name.
        indices: index of each file.
    """

    splits: dict[str, SplitSamples]
    indices: tuple[LineIndex, ...]

    def places(self, split: str, first: int, count: int) -> np.ndarray:
        """Return the locations of ``count`` samples of a split, which repeats after its end: ``PLACE`` [count]."""
        samples = self.splits[split]
        return samples.places(np.arange(first, first + count) % samples.num_samples, self.indices)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the scheduler.

    Attributes:
        num_clients: number of clients. Every client requests every step.
        limit_tokens: largest number of tokens of all unfinished steps together.
        wait_seconds: time after which a waiting call returns an empty list.
    """

    num_clients: int
    limit_tokens: int
    wait_seconds: float = 30.0


@dataclass(frozen=True, eq=False, slots=True)
class PlannedStep:
    """Planned step, shared by all clients.

    Attributes:
        places: locations of the samples, ``PLACE`` [n].
        plan: plan of the step, with the lengths of the samples.
        fell_back: whether this is the simple plan, because the planner ran out of time.
    """

    places: np.ndarray
    plan: StepPlan
    fell_back: bool


def server_of(places: np.ndarray, num_servers: int) -> np.ndarray:
    """Return the server of each sample, [n]. All samples of a document have one server, which caches its tokens."""
    servers: np.ndarray = (places["file"] + places["document"]) % num_servers
    return servers


@dataclass(eq=False, slots=True)
class _Step:
    """An unfinished step, which some client still needs.

    Attributes:
        places: locations of the samples, ``PLACE`` [n].
        most_tokens: upper bound of the tokens of their documents.
        task: task that plans the step; None until there is room.
    """

    places: np.ndarray
    most_tokens: int
    task: asyncio.Task[Reference[PlannedStep]] | None = None


@dataclass(eq=False, slots=True)
class _Progress:
    """Progress of the clients.

    Attributes:
        of_clients: last step that each client requested.
        num_clients: number of clients at each step.
    """

    of_clients: dict[int, int] = field(default_factory=dict)
    num_clients: Counter[int] = field(default_factory=Counter)

    def move(self, client: int, step_index: int) -> None:
        before = self.of_clients.get(client)
        self.of_clients[client] = step_index
        self.num_clients[step_index] += 1
        if before is not None:
            self.num_clients[before] -= 1
            self.num_clients += Counter()  # drops zeros


class LengthServer(Protocol):
    """Methods of a server that the scheduler calls."""

    @property
    def lengths(self) -> RemoteMethod[[np.ndarray], np.ndarray]:
        """Method from ``PLACE`` [n] to the number of tokens of each sample, [n]."""


class StepScheduler:
    """Plans steps for several clients. Its methods run in one event loop.

    Args:
        servers: handles whose ``lengths.remote(places)`` can be awaited.
        samples: samples of all splits.
        make_plan: function that plans and checks a step.
        limits: limits of the scheduler.
        share: function that stores a planned step for all clients (``ray.put``).
    """

    def __init__(
        self,
        servers: Sequence[LengthServer],
        samples: Samples,
        make_plan: MakePlan,
        limits: Limits,
        share: Callable[[PlannedStep], Reference[PlannedStep]],
    ) -> None:
        self._servers = servers
        self._samples = samples
        self._make_plan = make_plan
        self._limits = limits
        self._share = share
        self._steps: dict[_Key, _Step] = {}
        self._progress = {split: _Progress() for split in samples.splits}
        self._room = asyncio.Condition()
        self._peak_tokens = 0

    async def plan_step(
        self, client: int, split: str, step_index: int, first: int, count: int
    ) -> list[Reference[PlannedStep]]:
        """Return a list with one reference to the step of ``count`` samples from ``first`` on.

        A client that requests a step must have fetched all steps of lower ``step_index``. The split repeats after its
        end. The call waits for room, and returns an empty list if it has waited long; the client then repeats it.
        Raises the error of a server, the planner or the check.
        """
        key = split, step_index, first, count
        async with self._room:
            self._progress[split].move(client, step_index)
            self._forget_finished(split)
            step = self._step(key)
            room = self._room.wait_for(lambda: step.task is not None or self._has_room(key, step))
            try:
                await asyncio.wait_for(room, self._limits.wait_seconds)
            except TimeoutError:
                return []
            task = self._begin(step)
        await asyncio.wait([task], timeout=self._limits.wait_seconds)
        if not task.done():
            return []
        if task.exception() is not None and self._steps.get(key) is step:
            del self._steps[key]  # the next call plans the step again
        shared = task.result()
        self._begin_ahead((split, step_index + 1, first + count, count))
        return [shared]

    async def held_tokens(self) -> tuple[int, int]:
        """Return (current, highest so far) upper bound of the tokens of all unfinished steps."""
        return self._held_tokens(), self._peak_tokens

    def _held_tokens(self) -> int:
        return sum(step.most_tokens for step in self._steps.values() if step.task is not None)

    def _step(self, key: _Key) -> _Step:
        if key not in self._steps:
            split, _, first, count = key
            places = self._samples.places(split, first, count)
            self._steps[key] = _Step(places, int(places["tokens"].sum()))
        return self._steps[key]

    def _has_room(self, key: _Key, step: _Step) -> bool:
        """Return whether the step fits the limit or is the oldest of its split."""
        split, step_index = key[:2]
        fits = self._held_tokens() + step.most_tokens <= self._limits.limit_tokens
        return fits or all(other[0] != split or other[1] >= step_index for other in self._steps)

    def _begin(self, step: _Step) -> asyncio.Task[Reference[PlannedStep]]:
        if step.task is None:
            step.task = asyncio.get_running_loop().create_task(self._plan_at(step.places))
            # plan_step raises the error; reading it here only avoids asyncio's warning.
            step.task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._peak_tokens = max(self._peak_tokens, self._held_tokens())
        return step.task

    def _begin_ahead(self, key: _Key) -> None:
        """Start a step before a client requests it, if there is room."""
        split, _, first, count = key
        if first + count <= self._samples.splits[split].num_samples and key not in self._steps:
            step = self._step(key)
            if self._has_room(key, step):
                self._begin(step)

    def _forget_finished(self, split: str) -> None:
        """Drop the steps that every client has passed, and wake calls that wait for room."""
        progress = self._progress[split]
        if len(progress.of_clients) < self._limits.num_clients:
            return
        slowest = min(progress.num_clients)
        for key in [key for key in self._steps if key[0] == split and key[1] < slowest]:
            del self._steps[key]
            self._room.notify_all()

    async def _plan_at(self, places: np.ndarray) -> Reference[PlannedStep]:
        servers = server_of(places, len(self._servers))
        used = [number for number in range(len(self._servers)) if (servers == number).any()]
        calls = asyncio.gather(*(self._servers[n].lengths.remote(places[servers == n]) for n in used))
        try:
            answers = await asyncio.wait_for(calls, _TOKENIZE_SECONDS)
        except TimeoutError:
            raise RuntimeError(
                f"--hdp-loader ray: {len(used)} servers have not tokenized the {len(places)} samples of a step in "
                f"{_TOKENIZE_SECONDS:g} s: give more --hdp-ray-servers"
            ) from None
        lengths = np.zeros(len(places), dtype=np.int64)
        for number, answer in zip(used, answers, strict=True):
            lengths[servers == number] = answer
        return await asyncio.to_thread(self._plan, places, Numbers(lengths))

    def _plan(self, places: np.ndarray, lengths: Numbers) -> Reference[PlannedStep]:
        plan, fell_back = self._make_plan(lengths)
        assert plan.lengths == lengths, f"a plan of other sequences: {plan.lengths=} {lengths=}"
        return self._share(PlannedStep(places, plan, fell_back))
