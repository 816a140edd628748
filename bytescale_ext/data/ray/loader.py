"""The loader of one rank with ``--hdp-loader ray``: the steps of ``StepLoader``, planned and tokenized by actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bytescale_ext.data.loading.loader import StepsAhead
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch
from bytescale_ext.data.ray.actors import RemoteActors
from bytescale_ext.data.ray.fetching import fetch_answers, fetch_shared
from bytescale_ext.data.ray.scheduler import PlannedStep, server_of
from bytescale_ext.plan.step.micro_batch import MicroBatch


@dataclass(frozen=True, eq=False, slots=True)
class RemoteSplit:
    """The samples of one split, for the clients.

    Attributes:
        actors: the actors that load it.
        name: name of the split in the scheduler.
        num_samples: samples in it.
        paths: the files; ``file`` of a place is an index into them.
    """

    actors: RemoteActors
    name: str
    num_samples: int
    paths: tuple[str, ...]


class _FetchedSource:
    """The fetched token ranges of one step, as a ``TokenSource`` whose samples are the sequences of the step."""

    def __init__(self, planned: PlannedStep, paths: Sequence[str]) -> None:
        self._planned = planned
        self._paths = paths
        self._read: dict[tuple[int, int, int], np.ndarray] = {}

    def add(self, wanted: Sequence[tuple[int, int, int]], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Add the tokens that a server read for ranges (seq, start, stop); ``counts``: tokens of each range, [n]."""
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
class _RemoteSteps:
    """A ``StepMaker`` that asks the scheduler and the servers."""

    split: RemoteSplit
    plans: PlanMaker
    client: int
    settings: LoaderSettings
    reads_tokens: bool

    def sample_ids(self, consumed_samples: int) -> tuple[int, ...] | None:
        return self.settings.sample_ids(consumed_samples, self.split.num_samples)

    def step(self, step_index: int, sample_ids: tuple[int, ...], should_stop: Callable[[], bool]) -> StepBatch:
        began = time.perf_counter()
        asked = self.client, self.split.name, step_index, sample_ids[0], len(sample_ids)
        planned = fetch_shared(lambda: self.split.actors.scheduler.plan_step.remote(*asked), should_stop)
        seconds = time.perf_counter() - began
        return replace(self._read(step_index, sample_ids, planned, should_stop), plan_seconds=seconds)

    def simple_step(self, batch: StepBatch) -> StepBatch:
        assert batch.places is not None
        plan, fell_back = self.plans.simple(batch.lengths)
        return self._read(batch.step_index, batch.sample_ids, PlannedStep(batch.places, plan, fell_back), bool)

    def _read(
        self, step_index: int, sample_ids: tuple[int, ...], planned: PlannedStep, should_stop: Callable[[], bool]
    ) -> StepBatch:
        began = time.perf_counter()
        plan = planned.plan
        units = self.settings.units(plan)
        source = self._fetch(planned, [unit.micro_batch for unit in units], should_stop)
        micro_batches = self.settings.read(units, source, range(len(sample_ids)), plan.lengths)
        return StepBatch(
            step_index=step_index,
            sample_ids=sample_ids,
            plan=plan,
            micro_batches=micro_batches,
            read_seconds=time.perf_counter() - began,
            fell_back=planned.fell_back,
            places=planned.places,
        )

    def _fetch(
        self, planned: PlannedStep, mine: Sequence[MicroBatch], should_stop: Callable[[], bool]
    ) -> _FetchedSource:
        """Fetch the token ranges of the shards, each with its label token, one call to each server that has any."""
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
        split: the samples, and the actors that load them.
        plans: makes the simple plans; an equal one in the scheduler makes all others.
        client: number of this process among all clients.
        settings: as for ``StepLoader``.
        reads_tokens: fetch tokens; else they are 0 and only the plan is used (middle stages of a pipeline).
    """

    def __init__(
        self, split: RemoteSplit, plans: PlanMaker, client: int, settings: LoaderSettings, reads_tokens: bool = True
    ) -> None:
        super().__init__(_RemoteSteps(split, plans, client, settings, reads_tokens), settings)
