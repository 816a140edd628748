"""The remote loader (ByteScale section 7): Ray actors read and tokenize text, ranks fetch their own token ranges.

::

    rank 0    starts or joins Ray; starts servers and scheduler; indexes the files
    servers   text -> tokens, kept in a bounded cache          remote_server.py
    scheduler samples of a step -> lengths -> plan, ahead      remote_scheduler.py
    each rank plan of the step, then one call to each server that holds tokens of its own

Ray restarts an actor that dies, and repeats the calls it had not answered; servers and scheduler can answer them anew.
Only ``remote*.py`` imports Ray, and only inside functions: it is an optional package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytescale_ext.config import RemoteConfig
from bytescale_ext.data.planning import Planner, plan_in_time
from bytescale_ext.data.remote_lines import LineIndex, chunks, index_file, join_indices, load_index, save_index
from bytescale_ext.data.remote_scheduler import SplitSamples, StepScheduler
from bytescale_ext.data.remote_server import TokenServer
from bytescale_ext.data.texts import Encode
from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.shapes import StepPlan

_CONNECT_SECONDS = 5.0
_OBJECT_STORE_BYTES = 256 << 20
_SERVER_THREADS = 4
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 600.0  # no actor takes so long, not even one that is started again
_PATIENCE_SECONDS = 120.0  # then a call that can be repeated is made again
_SHARED_SECONDS = 10.0  # a value that lies there already
_ATTEMPTS = 5
_START_ATTEMPTS = 3  # Ray gives its processes 30 s to start, which a busy machine may exceed
_NOT_INSTALLED = "--hdp-loader ray: Ray is not installed: pip install '.[ray]', or use --hdp-loader local"
_FOREVER: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}


@dataclass(frozen=True)
class RemoteText:
    """Which text is trained on, and how it becomes tokens.

    Attributes:
        paths: JSONL files.
        longest: tokens of the longest sample.
        tokenizer: the tokenizer in words: an index that was kept is used for the same words only.
        build_encode: makes the function from text to tokens, in each server; picklable.
        cache_folder: where the index of each file is kept, or None.
    """

    paths: tuple[str, ...]
    longest: int
    tokenizer: str
    build_encode: Callable[[], Encode]
    cache_folder: str | None = None


@dataclass(frozen=True)
class RemoteAddress:
    """How a rank finds the actors of this run; sent from rank 0 to the others.

    Attributes:
        ray: host:port of Ray.
        namespace: of the actors of this run.
        num_servers: servers in it.
        auth_mode: how the Ray that was started authenticates (``RAY_AUTH_MODE``; its token, which stays in the user's
            home, is Ray's own business); None in a cluster, where each process has its own setting.
    """

    ray: str
    namespace: str
    num_servers: int
    auth_mode: str | None = None


@dataclass(frozen=True, eq=False)
class RemoteActors:
    """Handles of the actors of this run.

    Attributes:
        address: where they are.
        servers: of ``TokenServer``.
        scheduler: of ``StepScheduler``.
    """

    address: RemoteAddress
    servers: tuple[Any, ...]
    scheduler: Any


def check_remote(config: RemoteConfig) -> None:
    """Find out at start, on every rank, that Ray is installed and answers at its address. Raises ValueError."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(_NOT_INSTALLED)
    if config.address is None:
        return
    host, _, port = config.address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--hdp-ray-address {config.address}: give HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--hdp-ray-address {config.address}: nothing answers there ({error}): start Ray with `ray start --head`, "
            "or leave the flag out to have it started on this machine"
        ) from error


class RemoteServers:
    """The servers of a run, as rank 0 starts them: also Ray itself, unless there is an address.

    Ray ends with this process, or at ``close``; so do the actors, also in a cluster that goes on.

    Raises:
        ValueError: Ray cannot be started or joined.
    """

    def __init__(self, config: RemoteConfig, text: RemoteText) -> None:
        self._config = config
        self._text = text
        namespace = f"bytescale-{uuid.uuid4().hex[:12]}"
        ray_address = _start_ray(config.address, namespace)
        auth_mode = os.environ.get("RAY_AUTH_MODE") if config.address is None else None  # Ray has chosen it just now
        self.address = RemoteAddress(ray_address, namespace, config.num_servers, auth_mode)
        arguments = (text.paths, config.json_key, text.longest, config.server_tokens, text.build_encode)
        self._servers = tuple(
            _actor(TokenServer, f"server-{number}", max_concurrency=_SERVER_THREADS).remote(*arguments)
            for number in range(config.num_servers)
        )

    def index_files(self) -> tuple[LineIndex, ...]:
        """The documents of each file, found by all servers together, or kept from an earlier run.

        Raises:
            ValueError: a line of a file is bad (the first one is named), or a file has no text.
        """
        wanted = [self._begin_index(number, path) for number, path in enumerate(self._text.paths)]
        found = []
        for path, (file, kept, parts) in zip(self._text.paths, wanted, strict=True):
            index = kept or join_indices([_fetch_first(part) for part in parts])
            if not len(index):
                raise ValueError(f"{path}: no text under the key {self._config.json_key!r}: give a file with documents")
            if file is not None and kept is None:
                save_index(file, index)
            found.append(index)
        return tuple(found)

    def start_scheduler(
        self,
        splits: dict[str, SplitSamples],
        indices: Sequence[LineIndex],
        make_plan: Callable[[tuple[int, ...]], tuple[StepPlan, bool]],
        num_clients: int,
    ) -> RemoteActors:
        """Start the scheduler; ``num_clients`` ranks will ask for each step. ``make_plan``: see ``checked_plan``."""
        ray = _ray()
        limit_tokens = self._config.num_servers * self._config.server_tokens
        # Many clients may wait for a step at once: each is a call of the actor that runs.
        actor = _actor(_SchedulerActor, "scheduler", max_concurrency=1000 + num_clients)
        # Kept here: a scheduler that is restarted reads them again.
        self._samples = ray.put((splits, tuple(indices)))
        scheduler = actor.remote([self._samples], self._servers, make_plan, num_clients, limit_tokens)
        _fetch_first(scheduler.held_tokens.remote())  # it is there before others look for it
        return RemoteActors(self.address, self._servers, scheduler)

    def close(self) -> None:
        """End the actors, and Ray if it was started here. May be called twice."""
        _ray().shutdown()

    def _begin_index(self, number: int, path: str) -> tuple[Path | None, LineIndex | None, list[Any]]:
        """(file that keeps the index, the kept index, else the calls that make it)."""
        text, servers = self._text, self._servers
        file = None
        if text.cache_folder is not None:
            file = index_file(text.cache_folder, path, self._config.json_key, text.longest, text.tokenizer)
            kept = load_index(file)
            if kept is not None:
                return file, kept, []
        ranges = chunks(path)
        return file, None, [servers[i % len(servers)].index.remote(number, *part) for i, part in enumerate(ranges)]


class _SchedulerActor(StepScheduler):
    """``StepScheduler`` whose samples lie in Ray's object store, as does what it gives out."""

    def __init__(
        self,
        samples: list[Any],
        servers: Sequence[Any],
        make_plan: Callable[[tuple[int, ...]], tuple[StepPlan, bool]],
        num_clients: int,
        limit_tokens: int,
    ) -> None:
        splits, indices = fetch(samples[0])
        super().__init__(servers, splits, indices, make_plan, num_clients, limit_tokens, _ray().put)


def join_actors(address: RemoteAddress) -> RemoteActors:
    """The actors that rank 0 has started, for another process of any machine of the same Ray cluster."""
    if address.auth_mode is not None:  # Ray reads it from the environment when it is imported, and only there
        os.environ.setdefault("RAY_AUTH_MODE", address.auth_mode)
    ray = _ray()
    _start_ray(address.ray, address.namespace)
    servers = tuple(ray.get_actor(f"server-{number}") for number in range(address.num_servers))
    return RemoteActors(address, servers, ray.get_actor("scheduler"))


def checked_plan(
    planner: Planner,
    tokens_multiple: int,
    plan_seconds: float | None,
    lengths: tuple[int, ...],
    num_layers: int | None = None,
) -> tuple[StepPlan, bool]:
    """The plan of a step after its check, and whether it is the simple one for want of time. Bind all but lengths."""
    plan, fell_back = plan_in_time(planner, lengths, plan_seconds)
    check_step_plan(plan, tokens_multiple=tokens_multiple, num_layers=num_layers)
    return plan, fell_back


def fetch(reference: Any, should_stop: Callable[[], bool] = bool, seconds: float = _ANSWER_SECONDS) -> Any:
    """``ray.get``, raising what the actor raised with its own type; RuntimeError soon after ``should_stop``.

    Raises:
        TimeoutError: no answer for ``seconds``.
    """
    ray = _ray()
    deadline = time.monotonic() + seconds
    while not should_stop():
        try:
            return ray.get(reference, timeout=_POLL_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"--hdp-loader ray: no answer from an actor for {seconds:g} s; Ray's logs are in "
                    "/tmp/ray/session_latest/logs"
                ) from None
        except ray.exceptions.RayTaskError as error:
            cause: BaseException = error
            while isinstance(getattr(cause, "cause", None), BaseException):
                cause = cause.cause  # type: ignore[attr-defined]
            raise cause from None
    raise RuntimeError("the loader is closed")


def fetch_answers(calls: Sequence[Callable[[], Any]], should_stop: Callable[[], bool] = bool) -> list[Any]:
    """``fetch`` of what each call gives; all are made at once, and one whose answer does not come is made again."""
    begun = [call() for call in calls]
    return [_answer(call, reference, should_stop) for call, reference in zip(calls, begun, strict=True)]


def _answer(call: Callable[[], Any], reference: Any, should_stop: Callable[[], bool]) -> Any:
    for _ in range(_ATTEMPTS - 1):
        try:
            return fetch(reference, should_stop, _PATIENCE_SECONDS)
        except TimeoutError:
            reference = call()
    return fetch(reference, should_stop, _PATIENCE_SECONDS)


def fetch_shared(call: Callable[[], Any], should_stop: Callable[[], bool] = bool) -> Any:
    """The value whose reference is the one item of the list that ``call()`` gives.

    Called again while the list is empty, and if the value was lost: it goes with the actor that made it, and a process
    that drops one reference to it while it gets another may wait in vain.

    Raises:
        TimeoutError: no answer, or lost each time.
    """
    ray = _ray()
    attempts_left = _ATTEMPTS
    while True:
        shared: list[Any] = []
        while not shared:
            (shared,) = fetch_answers([call], should_stop)
        try:
            return fetch(shared[0], should_stop, _SHARED_SECONDS)
        except (ray.exceptions.ObjectLostError, TimeoutError):
            attempts_left -= 1
            if not attempts_left:
                raise
            time.sleep(0.1)


def _fetch_first(reference: Any) -> Any:
    """``fetch`` of an actor's first answer. Raises ValueError where the actor cannot start."""
    try:
        return fetch(reference)
    except _ray().exceptions.RayActorError as error:
        said = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"--hdp-loader ray: an actor cannot start ({said}): install this package on every machine of the cluster"
        ) from error


def _actor(kind: type, name: str, **options: Any) -> Any:
    ray = _ray()
    return ray.remote(kind).options(name=name, scheduling_strategy="SPREAD", **_FOREVER, **options)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(_NOT_INSTALLED) from error
    return ray


def _start_ray(address: str | None, namespace: str) -> str:
    """Join the Ray at ``address``, or start one on this machine that ends with this process. Returns its address."""
    ray = _ray()
    # Actors import this package from where this process has it.
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    options: dict[str, Any] = {
        "namespace": namespace,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}},
        "log_to_driver": False,
        "configure_logging": False,
    }
    if address is None:
        address = "local"
        options |= {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False}
        options |= {"object_store_memory": _OBJECT_STORE_BYTES}
    with _own_signals():
        for attempts_left in reversed(range(_START_ATTEMPTS if address == "local" else 1)):
            try:
                context = ray.init(address=address, **options)
                break
            except Exception as error:  # of many types, none of them documented
                ray.shutdown()
                if not attempts_left:
                    raise _no_ray(address, error) from error
    return str(context.address_info["address"])


def _no_ray(address: str, error: Exception) -> ValueError:
    """The error for a Ray that cannot be started ("local") or joined."""
    said = " ".join(f"{error} {error.__cause__ or ''}".split())
    if address == "local":
        return ValueError(f"--hdp-loader ray: Ray cannot be started on this machine: {said}")
    return ValueError(
        f"--hdp-ray-address {address}: cannot join ({said}): every machine of the run must be part of that cluster "
        f"(`ray start --address {address}`), with this version of Ray and the same RAY_AUTH_MODE"
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep Ray from taking SIGTERM: ``--exit-signal-handler`` and the launcher rely on its handler."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
