"""A rank's side of the remote loader: the steps of ``StepLoader``, planned and tokenized elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bytescale_ext.data.loader import StepBatch, StepsAhead, next_samples
from bytescale_ext.data.planning import Planner
from bytescale_ext.data.remote import RemoteActors, fetch_answers, fetch_shared
from bytescale_ext.data.remote_scheduler import PlannedStep, server_of
from bytescale_ext.data.units import units_of
from bytescale_ext.plan.document_slices import SliceRule
from bytescale_ext.plan.shapes import MicroBatch


@dataclass(frozen=True, eq=False, slots=True)
class RemoteSplit:
    """One split as the clients see it.

    Attributes:
        actors: that load it.
        name: of the split, as the scheduler knows it.
        num_samples: samples in it.
        paths: the files, as ``file`` of a place counts them.
    """

    actors: RemoteActors
    name: str
    num_samples: int
    paths: tuple[str, ...]


class _FetchedSource:
    """The ranges of one step that were fetched; its samples are the sequences of the step."""

    def __init__(self, planned: PlannedStep, paths: Sequence[str]) -> None:
        self._planned = planned
        self._paths = paths
        self._read: dict[tuple[int, int, int], np.ndarray] = {}

    def add(self, wanted: Sequence[tuple[int, int, int]], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Take in what a server gave for (seq, start, stop)."""
        ends = np.cumsum(counts)[:-1]
        self._read.update(zip(wanted, np.split(tokens.astype(np.int64), ends), strict=True))

    def __len__(self) -> int:
        return len(self._planned.places)

    def length(self, sample_id: int) -> int:
        return self._planned.plan.lengths[sample_id]

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        return self._read[sample_id, start, stop]

    def describe(self, sample_id: int) -> str:
        place = self._planned.places[sample_id]
        start = int(place["start"])
        path = self._paths[int(place["file"])]
        return f"{path}: document {place['document']} tokens {start}-{start + self.length(sample_id)}"


@dataclass(frozen=True, eq=False, slots=True)
class _RemoteRecipe:
    """A ``StepMaker`` that asks the scheduler and the servers."""

    split: RemoteSplit
    planner: Planner
    client: int
    rank: int
    samples_per_step: int
    rows_multiple: int
    vocab_size: int | None
    cyclic: bool
    pin_memory: bool
    reads_tokens: bool
    slice_rule: SliceRule | None

    def sample_ids(self, consumed_samples: int) -> tuple[int, ...] | None:
        return next_samples(consumed_samples, self.samples_per_step, self.split.num_samples, self.cyclic)

    def step(self, step_index: int, sample_ids: tuple[int, ...], should_stop: Callable[[], bool]) -> StepBatch:
        began = time.perf_counter()
        asked = self.client, self.split.name, step_index, sample_ids[0], len(sample_ids)
        planned = fetch_shared(lambda: self.split.actors.scheduler.plan_step.remote(*asked), should_stop)
        return self._batch(step_index, sample_ids, planned, time.perf_counter() - began, should_stop)

    def simple_step(self, step_index: int, sample_ids: tuple[int, ...], planned: PlannedStep) -> StepBatch:
        """The same step by the planner's simple plan."""
        plan = self.planner.fallback(planned.plan.lengths)
        return self._batch(step_index, sample_ids, PlannedStep(planned.places, plan, True), 0.0, bool)

    def _batch(
        self,
        step_index: int,
        sample_ids: tuple[int, ...],
        planned: PlannedStep,
        plan_seconds: float,
        should_stop: Callable[[], bool],
    ) -> StepBatch:
        began = time.perf_counter()
        plan = planned.plan
        units = units_of(plan.ranks[self.rank], plan.lengths, self.rank, self.rows_multiple, self.slice_rule)
        source = self._fetch(planned, [unit.micro_batch for unit in units], should_stop)
        seqs = range(len(sample_ids))
        packed = (unit.read(source, seqs, plan.lengths, self.vocab_size) for unit in units)
        micro_batches = tuple(one.pinned() if self.pin_memory else one for one in packed)
        return StepBatch(
            step_index=step_index,
            sample_ids=sample_ids,
            lengths=plan.lengths,
            plan=plan,
            micro_batches=micro_batches,
            num_tokens=sum(plan.lengths),
            plan_seconds=plan_seconds,
            read_seconds=time.perf_counter() - began,
            wait_seconds=0.0,
            fell_back=planned.fell_back,
            simple=None if planned.fell_back else partial(self.simple_step, step_index, sample_ids, planned),
        )

    def _fetch(
        self, planned: PlannedStep, mine: Sequence[MicroBatch], should_stop: Callable[[], bool]
    ) -> _FetchedSource:
        """The token ranges of my shards, each with its label token: one call to each server that holds some."""
        source = _FetchedSource(planned, self.split.paths)
        shards = (shard for micro_batch in mine for shard in micro_batch.shards)
        wanted = [(shard.seq, start, stop + 1) for shard in shards for start, stop in shard.ranges]
        if not wanted:
            return source
        rows = np.array(wanted, dtype=np.int64)
        if not self.reads_tokens:
            counts = rows[:, 2] - rows[:, 1] - 1
            source.add(wanted, np.zeros(int(counts.sum()), dtype=np.int64), counts)
            return source
        places = planned.places[rows[:, 0]]
        servers = server_of(places, len(self.split.actors.servers))
        asked = [np.flatnonzero(servers == number) for number in np.unique(servers)]
        calls = [
            partial(self.split.actors.servers[servers[here[0]]].read.remote, places[here], rows[here, 1:])
            for here in asked
        ]
        for here, (tokens, counts) in zip(asked, fetch_answers(calls, should_stop), strict=True):
            source.add([wanted[i] for i in here], tokens, counts)
        return source


class RemoteStepLoader(StepsAhead):
    """``StepLoader`` over remote actors: the same steps for the same data, seed and planner.

    Args:
        split: which samples, and who loads them.
        planner: for the simple plan alone; that of the scheduler, which makes the plans.
        client: number of this process among all that load.
        rank: HDP rank whose micro-batches are fetched.
        samples_per_step: samples of one step on all ranks.
        reads_tokens: fetch tokens; otherwise they are 0 and only the plan is used (middle stages of a pipeline).

    The others, and what ``next()`` raises, as ``StepLoader``.
    """

    def __init__(
        self,
        split: RemoteSplit,
        planner: Planner,
        client: int,
        rank: int,
        *,
        samples_per_step: int,
        consumed_samples: int = 0,
        first_step: int = 0,
        rows_multiple: int = 1,
        plan_ahead: int = 2,
        vocab_size: int | None = None,
        cyclic: bool = False,
        pin_memory: bool = False,
        reads_tokens: bool = True,
        slice_rule: SliceRule | None = None,
    ) -> None:
        recipe = _RemoteRecipe(
            split, planner, client, rank, samples_per_step, rows_multiple, vocab_size, cyclic, pin_memory, reads_tokens,
            slice_rule,
        )  # fmt: skip
        super().__init__(recipe, plan_ahead, consumed_samples, first_step)
