"""Loader of one rank with ``--hdp-loader ray``: the same steps as ``StepLoader``, planned and tokenized by actors."""

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
    """Samples of one split, for the clients.

    Attributes:
        actors: actors that load the split.
        name: name of the split in the scheduler.
        num_samples: number of samples.
        paths: paths of the files, which ``file`` of a place indexes.
    """

    actors: RemoteActors
    name: str
    num_samples: int
    paths: tuple[str, ...]


class _FetchedSource:
    """Fetched token ranges of one step, as a ``TokenSource`` whose samples are the sequences of the step."""

    def __init__(self, planned: PlannedStep, paths: Sequence[str]) -> None:
        self._planned = planned
        self._paths = paths
        self._tokens: dict[tuple[int, int], np.ndarray] = {}  # (seq, start) -> tokens from there on

    def add(self, ranges: Sequence[tuple[int, int, int]], tokens: np.ndarray, counts: np.ndarray) -> None:
        """Add the tokens [total] of ranges (seq, start, stop); ``counts``: tokens of each range, [n]."""
        ends = np.cumsum(counts)[:-1]
        begins = [(seq, start) for seq, start, _ in ranges]
        self._tokens.update(zip(begins, np.split(tokens.astype(np.int64), ends), strict=True))

    def __len__(self) -> int:
        return len(self._planned.places)

    def length(self, sample_id: int) -> int:
        return self._planned.plan.lengths[sample_id]

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        return self._tokens[sample_id, start][: stop - start]

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

    def sample_ids(self, consumed_samples: int) -> Sequence[int] | None:
        return self.settings.sample_ids(consumed_samples, self.split.num_samples)

    def step(self, step_index: int, sample_ids: Sequence[int], should_stop: Callable[[], bool]) -> StepBatch:
        began = time.perf_counter()
        request = self.client, self.split.name, step_index, sample_ids[0], len(sample_ids)
        planned = fetch_shared(lambda: self.split.actors.scheduler.plan_step.remote(*request), should_stop)
        seconds = time.perf_counter() - began
        return replace(self._read(step_index, sample_ids, planned, should_stop), plan_seconds=seconds)

    def simple_step(self, batch: StepBatch) -> StepBatch:
        assert batch.places is not None
        plan, fell_back = self.plans.simple(batch.lengths)
        return self._read(batch.step_index, batch.sample_ids, PlannedStep(batch.places, plan, fell_back), bool)

    def _read(
        self, step_index: int, sample_ids: Sequence[int], planned: PlannedStep, should_stop: Callable[[], bool]
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
            predicted=self.plans.predicted(plan),
        )

    def _fetch(
        self, planned: PlannedStep, micro_batches: Sequence[MicroBatch], should_stop: Callable[[], bool]
    ) -> _FetchedSource:
        """Fetch the token ranges of micro-batches, with labels and later tokens: one call to each server involved."""
        source = _FetchedSource(planned, self.split.paths)
        shards = [shard for micro_batch in micro_batches for shard in micro_batch.shards]
        lengths, more = planned.plan.lengths, self.settings.future_tokens
        ranges = [
            (shard.seq, start, min(stop + more, lengths[shard.seq]) + 1)
            for shard in shards
            for start, stop in shard.ranges
        ]
        if self.settings.weighs_future:  # weights depend on whether the last token of a sample has a label
            ranges += [(seq, lengths[seq] - 1, lengths[seq] + 1) for seq in {shard.seq for shard in shards}]
        if not ranges:
            return source
        rows = np.array(ranges, dtype=np.int64)
        if not self.reads_tokens:
            counts = rows[:, 2] - rows[:, 1] - 1
            source.add(ranges, np.zeros(int(counts.sum()), dtype=np.int64), counts)
            return source
        places = planned.places[rows[:, 0]]
        servers = server_of(places, len(self.split.actors.servers))
        requests = [np.flatnonzero(servers == number) for number in np.unique(servers)]
        calls = [
            partial(self.split.actors.servers[servers[request[0]]].read.remote, places[request], rows[request, 1:])
            for request in requests
        ]
        for request, (tokens, counts) in zip(requests, fetch_answers(calls, should_stop), strict=True):
            source.add([ranges[i] for i in request], tokens, counts)
        return source


class RemoteStepLoader(StepsAhead):
    """``StepLoader`` over remote actors, with the same steps for the same data, seed and planner.

    Args:
        split: samples, and the actors that load them.
        plans: maker of simple plans; an equal maker in the scheduler makes all other plans.
        client: number of this process among all clients.
        settings: settings of the loader.
        reads_tokens: whether to fetch tokens; if not, tokens are 0 and only the plan is used (middle pipeline stages).
    """

    def __init__(
        self, split: RemoteSplit, plans: PlanMaker, client: int, settings: LoaderSettings, reads_tokens: bool = True
    ) -> None:
        super().__init__(_RemoteSteps(split, plans, client, settings, reads_tokens), settings)
