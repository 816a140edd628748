"""Actors of the remote loader (ByteScale section 7), which read, tokenize and plan ahead.

::

    rank 0    starts or joins Ray; starts servers and scheduler; indexes the files    session.py, actors.py
    servers   text -> tokens, in a cache of limited size                              server.py
    scheduler samples of a step -> lengths -> plan, ahead of training                 scheduler.py
    each rank fetches the plan of a step, then its own token ranges from the servers  loader.py, fetching.py

Ray restarts an actor that dies and repeats its unanswered calls. Servers and scheduler then return the same answers.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.data.ray.fetching import Reference, RemoteMethod, fetch, fetch_first
from bytescale_ext.data.ray.lines import LineIndex, chunks, index_file, join_indices, load_index, save_index
from bytescale_ext.data.ray.scheduler import Limits, MakePlan, PlannedStep, Samples, StepScheduler
from bytescale_ext.data.ray.server import TokenServer
from bytescale_ext.data.ray.session import ray_module, start_ray, stay_on_loopback
from bytescale_ext.data.samples.texts import Encode

_SERVER_THREADS = 4
_FOREVER = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}


@dataclass(frozen=True)
class RemoteText:
    """Text to train on, and its tokenizer.

    Attributes:
        paths: paths of the files with documents, as the user gives them.
        longest: tokens of the longest sample.
        tokenizer: description of the tokenizer, which is part of the key of a cached index.
        build_encode: picklable function that builds the function from text to tokens, in each server.
        cache_folder: folder for the index of each file, or None.
        files: file of plain lines for each path, or () if each path is one.
    """

    paths: tuple[str, ...]
    longest: int
    tokenizer: str
    build_encode: Callable[[], Encode]
    cache_folder: str | None = None
    files: tuple[str, ...] = ()

    @property
    def line_files(self) -> tuple[str, ...]:
        """The file of plain lines for each path."""
        return self.files or self.paths


@dataclass(frozen=True)
class RemoteAddress:
    """Address of this run's actors, which rank 0 sends to the other ranks.

    Attributes:
        ray: host:port of Ray.
        namespace: Ray namespace of the actors.
        num_servers: number of servers.
        auth_mode: ``RAY_AUTH_MODE`` of a Ray that rank 0 started; None in a cluster, where each process has its own.
    """

    ray: str
    namespace: str
    num_servers: int
    auth_mode: str | None = None


class ServerHandle(Protocol):
    """Methods of a ``TokenServer`` in its own process."""

    @property
    def index(self) -> RemoteMethod[[int, int, int], LineIndex]: ...

    @property
    def lengths(self) -> RemoteMethod[[np.ndarray], np.ndarray]:
        """See ``TokenServer.lengths``: [n] -> [n]."""

    @property
    def read(self) -> RemoteMethod[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """See ``TokenServer.read``: [n] and [n, 2] -> [tokens] and [n]."""


class SchedulerHandle(Protocol):
    """Methods of a ``StepScheduler`` in its own process."""

    @property
    def plan_step(self) -> RemoteMethod[[int, str, int, int, int], list[Reference[PlannedStep]]]: ...

    @property
    def held_tokens(self) -> RemoteMethod[[], tuple[int, int]]: ...


class _ActorClass[Handle](Protocol):
    def remote(self, *arguments: object) -> Handle: ...


@dataclass(frozen=True, eq=False)
class RemoteActors:
    """Handles of this run's actors.

    Attributes:
        address: address of the actors.
        servers: handles of ``TokenServer``.
        scheduler: handle of ``StepScheduler``.
    """

    address: RemoteAddress
    servers: tuple[ServerHandle, ...]
    scheduler: SchedulerHandle


class RemoteServers:
    """Servers of a run. Rank 0 starts them, and starts Ray unless the configuration has an address.

    The actors end at ``close`` or with this process; so does a Ray that was started here.

    Raises:
        ValueError: Ray cannot be started or joined.
    """

    def __init__(self, config: RemoteConfig, text: RemoteText) -> None:
        self._config = config
        self._text = text
        namespace = f"bytescale-{uuid.uuid4().hex[:12]}"
        ray_address = start_ray(config.address, namespace)
        auth_mode = os.environ.get("RAY_AUTH_MODE") if config.address is None else None  # set by Ray when it started
        self.address = RemoteAddress(ray_address, namespace, config.num_servers, auth_mode)
        arguments = (text.line_files, config.json_key, text.longest, config.server_tokens, text.build_encode)
        actors: list[_ActorClass[ServerHandle]] = [
            _actor(TokenServer, f"server-{number}", _SERVER_THREADS) for number in range(config.num_servers)
        ]
        self._servers = tuple(actor.remote(*arguments) for actor in actors)

    def index_files(self) -> tuple[LineIndex, ...]:
        """Return the index of each file, from the cache or computed by all servers together.

        Raises:
            ValueError: a line of a file is invalid (the message names the first), or a file has no text.
        """
        begun = [self._begin_index(number, path) for number, path in enumerate(self._text.line_files)]
        indices = []
        for path, (file, cached, parts) in zip(self._text.paths, begun, strict=True):
            index = cached or join_indices([fetch_first(part) for part in parts])
            if not len(index):
                raise ValueError(f"{path}: no text under the key {self._config.json_key!r}: give a file with documents")
            if file is not None and cached is None:
                save_index(file, index)
            indices.append(index)
        return tuple(indices)

    def start_scheduler(
        self,
        samples: Samples,
        make_plan: MakePlan,
        num_clients: int,
    ) -> RemoteActors:
        """Start the scheduler for ``num_clients`` ranks. Every rank requests every step."""
        limits = Limits(num_clients, self._config.num_servers * self._config.server_tokens)
        # A client that waits for a step occupies one concurrent call of the actor.
        actor: _ActorClass[SchedulerHandle] = _actor(_SchedulerActor, "scheduler", 1000 + num_clients)
        # The reference keeps the samples alive, because a restarted scheduler reads them again.
        self._samples = ray_module().put(samples)
        scheduler = actor.remote([self._samples], self._servers, make_plan, limits)
        fetch_first(scheduler.held_tokens.remote())  # waits until the scheduler has started, so other ranks find it
        return RemoteActors(self.address, self._servers, scheduler)

    def close(self) -> None:
        """End the actors, and Ray if it was started here. May be called twice."""
        ray_module().shutdown()

    def _begin_index(self, number: int, path: str) -> tuple[Path | None, LineIndex | None, list[Reference[LineIndex]]]:
        """Return the file of an index or None, the cached index or None, and the calls that compute a missing index."""
        text, servers = self._text, self._servers
        file = None
        if text.cache_folder is not None:
            file = index_file(text.cache_folder, path, self._config.json_key, text.longest, text.tokenizer)
            cached = load_index(file)
            if cached is not None:
                return file, cached, []
        ranges = chunks(path)
        return file, None, [servers[i % len(servers)].index.remote(number, *part) for i, part in enumerate(ranges)]


class _SchedulerActor(StepScheduler):
    """``StepScheduler`` that reads its samples from Ray's object store and stores its steps there."""

    def __init__(
        self, samples: list[Reference[Samples]], servers: Sequence[ServerHandle], make_plan: MakePlan, limits: Limits
    ) -> None:
        super().__init__(servers, fetch(samples[0]), make_plan, limits, ray_module().put)


def join_actors(address: RemoteAddress) -> RemoteActors:
    """Return the actors that rank 0 has started, in any process of the same Ray cluster."""
    if address.auth_mode is not None:  # Ray reads the variable once, on import
        os.environ.setdefault("RAY_AUTH_MODE", address.auth_mode)
        stay_on_loopback()
    ray = ray_module()
    start_ray(address.ray, address.namespace)
    servers = tuple(ray.get_actor(f"server-{number}") for number in range(address.num_servers))
    return RemoteActors(address, servers, ray.get_actor("scheduler"))


def _actor[Handle](kind: type, name: str, max_concurrency: int) -> _ActorClass[Handle]:
    actor: _ActorClass[Handle] = (
        ray_module()
        .remote(kind)
        .options(name=name, scheduling_strategy="SPREAD", max_concurrency=max_concurrency, **_FOREVER)
    )
    return actor
