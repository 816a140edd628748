"""What runs in the scheduler actor of the remote loader: the order of samples and the plan of each step.

::

    client: plan_step(first sample) --> places of the samples --> servers: lengths --> planner, check --> PlannedStep

A step is planned once, however many clients ask for it, and the one after it is begun at once, so that servers
tokenize ahead of what is asked for. Back-pressure: a step is begun when the tokens of all steps that some client has
not finished, and its own, fit the servers' caches. The oldest step that is wanted is always begun, so no limit is too
small to go on. All state is rebuilt from the clients' calls: a restarted scheduler goes on. No call waits for long:
a client that would is told to ask again, so one that gets no answer at all knows that something is wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bytescale_ext.data.epochs import EpochOrder
from bytescale_ext.data.remote_lines import LineIndex
from bytescale_ext.data.remote_server import PLACE
from bytescale_ext.plan.placed import PlacedRanks
from bytescale_ext.plan.shapes import StepPlan

_WAIT_SECONDS = 30.0  # then a client is told to ask again
_TOKENIZE_SECONDS = 600.0

_Key = tuple[str, int, int, int]  # split, number of the step, its first sample, number of samples


@dataclass(frozen=True, eq=False, slots=True)
class FileSamples:
    """The samples of one split of one file.

    Attributes:
        file: number of the file.
        documents: document of each row of the sample table, [num_rows].
        starts: first token of each row in its document, [num_rows].
        order: which row each sample is.
    """

    file: int
    documents: np.ndarray
    starts: np.ndarray
    order: EpochOrder


@dataclass(frozen=True, eq=False, slots=True)
class SplitSamples:
    """The samples of one split: of one file, or of a blend of several.

    Attributes:
        num_samples: samples there are, over all epochs.
        files: the parts.
        part: for a blend, which part each sample is from, [num_samples]; else None.
        inner: for a blend, which sample of that part it is, [num_samples]; else None.
    """

    num_samples: int
    files: tuple[FileSamples, ...]
    part: np.ndarray | None = None
    inner: np.ndarray | None = None

    def places(self, samples: np.ndarray, indices: Sequence[LineIndex]) -> np.ndarray:
        """Where samples lie: ``PLACE`` [len(samples)]."""
        found = np.zeros(len(samples), dtype=PLACE)
        parts = np.zeros(len(samples), dtype=np.int64) if self.part is None else self.part[samples]
        inner = samples if self.inner is None else self.inner[samples]
        for number in np.unique(parts):
            here, one = parts == number, self.files[number]
            rows = one.order.rows(inner[here])
            documents, index = one.documents[rows], indices[one.file]
            found["file"][here], found["start"][here] = one.file, one.starts[rows]
            found["document"][here] = documents
            found["offset"][here], found["num_bytes"][here] = index.offsets[documents], index.num_bytes[documents]
            found["tokens"][here], found["is_counted"][here] = index.tokens[documents], index.is_counted[documents]
        return found


@dataclass(frozen=True, eq=False, slots=True)
class PlannedStep:
    """A step as all clients get it.

    Attributes:
        places: where its samples lie, ``PLACE`` [n].
        plan: the plan; its lengths are those of the samples.
        fell_back: the planner ran out of its time, and this is its simple plan.
    """

    places: np.ndarray
    plan: StepPlan
    fell_back: bool


def server_of(places: np.ndarray, num_servers: int) -> np.ndarray:
    """Which server reads each document, [n]: always the same one, so that its cache is of use."""
    servers: np.ndarray = (places["file"] + places["document"]) % num_servers
    return servers


@dataclass(eq=False, slots=True)
class _Step:
    """A step that some client has not finished.

    Attributes:
        places: where its samples lie, ``PLACE`` [n].
        most_tokens: tokens of their documents at most.
        task: plans it; None until there is room.
    """

    places: np.ndarray
    most_tokens: int
    task: asyncio.Task[Any] | None = None


@dataclass(eq=False, slots=True)
class _Progress:
    """Which step each client asked for last, and how many clients are at each."""

    of_clients: dict[int, int] = field(default_factory=dict)
    num_clients: Counter[int] = field(default_factory=Counter)

    def move(self, client: int, step_index: int) -> None:
        before = self.of_clients.get(client)
        self.of_clients[client] = step_index
        self.num_clients[step_index] += 1
        if before is not None:
            self.num_clients[before] -= 1
            self.num_clients += Counter()  # drops what is 0


class StepScheduler:
    """Plans steps for ``num_clients`` clients. Its methods run in one event loop.

    Args:
        servers: handles whose ``lengths.remote(places)`` can be awaited.
        splits: samples of each split by name.
        indices: index of each file.
        make_plan: lengths -> (plan, whether it is the simple one), checked; pure but for time limits.
        num_clients: how many clients ask for each step.
        limit_tokens: tokens of all unfinished steps at most.
        share: puts a planned step where many can fetch it (``ray.put``).
        wait_seconds: a call that has waited so long for room, or for its step, ends.
    """

    def __init__(
        self,
        servers: Sequence[Any],
        splits: dict[str, SplitSamples],
        indices: Sequence[LineIndex],
        make_plan: Callable[[tuple[int, ...]], tuple[StepPlan, bool]],
        num_clients: int,
        limit_tokens: int,
        share: Callable[[PlannedStep], Any],
        wait_seconds: float = _WAIT_SECONDS,
    ) -> None:
        self._servers = servers
        self._splits = splits
        self._indices = indices
        self._make_plan = make_plan
        self._num_clients = num_clients
        self._limit_tokens = limit_tokens
        self._share = share
        self._steps: dict[_Key, _Step] = {}
        self._progress = {split: _Progress() for split in splits}
        self._room = asyncio.Condition()
        self._peak_tokens = 0
        self._wait_seconds = wait_seconds

    async def plan_step(self, client: int, split: str, step_index: int, first: int, count: int) -> list[Any]:
        """The step of ``count`` samples from ``first`` on, in a list of one as ``share`` gave it.

        By asking, the client says that it has fetched all steps of lower ``step_index``. Samples go on at the start
        of the split after its end. Waits while there is no room; an empty list means: ask again. Raises what servers,
        planner or check raised.
        """
        key = split, step_index, first, count
        async with self._room:
            self._progress[split].move(client, step_index)
            self._forget_finished(split)
            step = self._step(key)
            room = self._room.wait_for(lambda: step.task is not None or self._has_room(key, step))
            try:
                await asyncio.wait_for(room, self._wait_seconds)
            except TimeoutError:
                return []
            task = self._begin(step)
        await asyncio.wait([task], timeout=self._wait_seconds)
        if not task.done():
            return []
        if task.exception() is not None and self._steps.get(key) is step:
            del self._steps[key]  # asked for again, it is tried again
        shared = task.result()
        self._begin_ahead((split, step_index + 1, first + count, count))
        return [shared]

    async def held_tokens(self) -> tuple[int, int]:
        """Most tokens of the documents of all unfinished steps, now, and at most so far."""
        return self._held_tokens(), self._peak_tokens

    def _held_tokens(self) -> int:
        return sum(step.most_tokens for step in self._steps.values() if step.task is not None)

    def _step(self, key: _Key) -> _Step:
        if key not in self._steps:
            split, _, first, count = key
            samples = self._splits[split]
            places = samples.places(np.arange(first, first + count) % samples.num_samples, self._indices)
            self._steps[key] = _Step(places, int(places["tokens"].sum()))
        return self._steps[key]

    def _has_room(self, key: _Key, step: _Step) -> bool:
        """The step fits, or is the oldest of its split."""
        split, step_index = key[:2]
        fits = self._held_tokens() + step.most_tokens <= self._limit_tokens
        return fits or all(other[0] != split or other[1] >= step_index for other in self._steps)

    def _begin(self, step: _Step) -> asyncio.Task[Any]:
        if step.task is None:
            step.task = asyncio.get_running_loop().create_task(self._planned(step.places))
            step.task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # raised where it is asked for
            self._peak_tokens = max(self._peak_tokens, self._held_tokens())
        return step.task

    def _begin_ahead(self, key: _Key) -> None:
        """Begin a step that nobody has asked for yet, if there is room for it."""
        split, _, first, count = key
        if first + count <= self._splits[split].num_samples and key not in self._steps:
            step = self._step(key)
            if self._has_room(key, step):
                self._begin(step)

    def _forget_finished(self, split: str) -> None:
        """Drop the steps that every client is past; those who wait for room are told."""
        progress = self._progress[split]
        if len(progress.of_clients) < self._num_clients:
            return
        slowest = min(progress.num_clients)
        for key in [key for key in self._steps if key[0] == split and key[1] < slowest]:
            del self._steps[key]
            self._room.notify_all()

    async def _planned(self, places: np.ndarray) -> Any:
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
        return await asyncio.to_thread(self._plan, places, tuple(lengths.tolist()))

    def _plan(self, places: np.ndarray, lengths: tuple[int, ...]) -> Any:
        plan, fell_back = self._make_plan(lengths)
        assert plan.lengths == lengths, f"a plan of other sequences: {plan.lengths=} {lengths=}"
        if isinstance(plan.ranks, PlacedRanks):
            plan = replace(plan, ranks=replace(plan.ranks))  # without what was computed from its arrays
        return self._share(PlannedStep(places, plan, fell_back))
