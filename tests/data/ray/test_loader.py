"""Remote loader over Ray: the steps of the local loader, even if actors are killed. All tests share one Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch
from bytescale_ext.data.ray.actors import RemoteServers, RemoteText
from bytescale_ext.data.ray.fetching import fetch
from bytescale_ext.data.ray.loader import RemoteSplit, RemoteStepLoader
from bytescale_ext.data.ray.scheduler import Samples
from bytescale_ext.data.ray.session import check_remote
from bytescale_ext.data.samples.texts import encoder
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.sizes import Cluster
from tests.data.ray.files import samples_of
from tests.data.text_files import LocalText, write_text

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ranks  # Ray starts a dozen processes

SEQ_LENGTH, BATCH, NUM_RANKS, SERVER_TOKENS = 64, 8, 2, 400
ROOT = Path(__file__).resolve().parents[3]
UNIT = CostModel(1.0, 1.0, 0.0, 0.0)
PLANNER = HdpPlanner(Cluster(NUM_RANKS, SEQ_LENGTH), (StageCost(UNIT, UNIT),), balance="none")


@pytest.fixture(autouse=True)
def ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten timeouts, so that a missing answer is an error within the time of a test."""
    monkeypatch.setattr("bytescale_ext.data.ray.fetching._REPEAT_SECONDS", 40.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "a.jsonl", 80)


@pytest.fixture(scope="module")
def servers(text: Path) -> Iterator[RemoteServers]:
    """Return servers of one file in a separate Ray, with caches for a small part of the file."""
    before = dict(os.environ)
    config = RemoteConfig(num_servers=2, server_tokens=SERVER_TOKENS)
    started = RemoteServers(config, RemoteText((str(text),), SEQ_LENGTH, "bytes", partial(encoder, None)))
    yield started
    started.close()
    os.environ.clear()
    os.environ.update(before)  # Ray sets its mode of authentication there


@pytest.fixture
def split(text: Path, servers: RemoteServers) -> Iterator[RemoteSplit]:
    """Return the samples of four epochs, with a separate scheduler."""
    yield from _split(text, servers, PLANNER)


def _split(text: Path, servers: RemoteServers, planner: Any) -> Iterator[RemoteSplit]:
    indices = servers.index_files()
    samples, _ = samples_of(text, num_epochs=4)
    actors = servers.start_scheduler(Samples({"train": samples}, indices), PlanMaker(planner), NUM_RANKS)
    yield RemoteSplit(actors, "train", samples.num_samples, (str(text),))
    ray.kill(actors.scheduler)


def settings_of(rank: int, options: dict[str, Any]) -> LoaderSettings:
    return LoaderSettings(rank, **{"samples_per_step": BATCH, "rows_multiple": 4, **options})


def loaders(split: RemoteSplit, **options: Any) -> list[RemoteStepLoader]:
    reads_tokens = options.pop("reads_tokens", True)
    return [
        RemoteStepLoader(split, PlanMaker(PLANNER), rank, settings_of(rank, options), reads_tokens)
        for rank in range(NUM_RANKS)
    ]


def local_loaders(text: Path, **options: Any) -> list[StepLoader]:
    source = LocalText(text, SEQ_LENGTH, num_epochs=4)
    return [StepLoader(source, PlanMaker(PLANNER), settings_of(rank, options)) for rank in range(NUM_RANKS)]


def key(batch: StepBatch) -> tuple[object, ...]:
    columns = ("tokens", "labels", "positions", "loss_mask", "future", "future_weights")
    values = [[getattr(packed, name) for name in columns] for packed in batch.micro_batches]
    tensors = [[None if value is None else value.tolist() for value in of_one] for of_one in values]
    documents = [packed.documents for packed in batch.micro_batches]
    return batch.step_index, batch.sample_ids, batch.lengths, batch.plan.digest(), tensors, documents


def take(loaders: list[Any], num_steps: int) -> list[list[tuple[object, ...]]]:
    return [[key(next(loader)) for loader in loaders] for _ in range(num_steps)]


def process_of(actor: Any) -> int:
    return int(fetch(actor.__ray_call__.remote(lambda _: os.getpid()), seconds=100))


def test_steps_equal_the_local_loader_through_epochs_and_to_the_end(text: Path, split: RemoteSplit) -> None:
    later = {"future_tokens": 2, "weighs_future": True}
    remote, local = loaders(split, **later), local_loaders(text, **later)
    num_steps = split.num_samples // BATCH
    assert num_steps > 20
    assert take(remote, num_steps) == take(local, num_steps)
    for loader in remote:
        with pytest.raises(StopIteration):
            next(loader)


@pytest.mark.full
def test_a_resumed_loader_goes_on(text: Path, split: RemoteSplit) -> None:
    expected = take(local_loaders(text), 12)
    first = loaders(split)
    take(first, 5)
    state = first[0].state_dict()
    assert state == {"consumed_samples": 5 * BATCH, "step_index": 5} == first[1].state_dict()
    for loader in first:
        loader.load_state_dict(state)
    assert take(first, 3) == expected[5:8]
    for loader in first:
        loader.close()
    second = loaders(split, consumed_samples=8 * BATCH, first_step=8)
    assert take(second, 4) == expected[8:]


@pytest.mark.full
@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_killed_actor_is_started_again_and_nothing_is_lost(text: Path, split: RemoteSplit, victim: str) -> None:
    actor = split.actors.servers[1] if victim == "server" else split.actors.scheduler
    remote = loaders(split, plan_ahead=1)
    steps = take(remote, 4)
    pid = process_of(actor)
    os.kill(pid, signal.SIGKILL)
    steps += take(remote, 6)
    ray.kill(actor, no_restart=False)
    steps += take(remote, 6)
    assert steps == take(local_loaders(text), 16)
    assert process_of(actor) != pid


@pytest.mark.full
def test_servers_hold_no_more_than_they_may(split: RemoteSplit) -> None:
    take(loaders(split), 20)
    for server in split.actors.servers:
        held, peak = fetch(server.held_tokens.remote())
        assert 0 < held <= peak <= SERVER_TOKENS


def test_tokens_that_are_not_wanted_are_not_fetched(text: Path, split: RemoteSplit) -> None:
    for remote, local in zip(loaders(split, reads_tokens=False), local_loaders(text), strict=True):
        mine, other = next(remote), next(local)
        assert mine.plan == other.plan
        for packed, expected in zip(mine.micro_batches, other.micro_batches, strict=True):
            assert not packed.tokens.any()
            assert packed.positions.tolist() == expected.positions.tolist()


def test_the_simple_plan_of_a_step_holds_the_same_tokens(split: RemoteSplit) -> None:
    remote = loaders(split)
    steps = [next(loader) for loader in remote]
    assert not any(step.fell_back for step in steps)
    simple = [loader.simple_step(step) for loader, step in zip(remote, steps, strict=True)]
    assert all(step.fell_back for step in simple)

    def tokens(some: list[StepBatch]) -> list[int]:
        return sorted(int(token) for step in some for packed in step.micro_batches for token in packed.tokens)

    assert sum(tokens(simple)) == sum(tokens(steps))


@pytest.mark.full
def test_a_bad_line_is_named_before_training(tmp_path: Path, text: Path) -> None:
    """The error is raised like in ``index_files``, because the servers of this module have another file."""
    from bytescale_ext.data.ray.server import TokenServer

    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(text.read_bytes() + b"{\n")
    line = text.read_bytes().count(b"\n") + 1
    actor = ray.remote(num_cpus=0)(TokenServer).remote([str(bad)], "text", 64, 100, partial(encoder, None))
    with pytest.raises(ValueError, match=f"bad.jsonl:{line}: not JSON") as caught:
        fetch(actor.index.remote(0, 0, 1 << 30))
    assert type(caught.value) is ValueError
    ray.kill(actor)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-port", "127.0.0.1:99999", ":6379"])
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=f"--hdp-ray-address {address}: "):
        check_remote(RemoteConfig(address=address))


@pytest.mark.full
def test_a_ray_of_this_machine_is_private_and_ends_with_its_process(text: Path, tmp_path: Path) -> None:
    """Ray listens only on the loopback interface, requires a token, and ends with the process in all cases."""
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from functools import partial
        from bytescale_ext.config.remote import RemoteConfig
        from bytescale_ext.data.ray.actors import RemoteServers, RemoteText
        from bytescale_ext.data.samples.texts import encoder
        text = RemoteText(({str(text)!r},), 64, "bytes", partial(encoder, None))
        servers = RemoteServers(RemoteConfig(num_servers=1), text)
        print(len(servers.index_files()[0]), servers.address.auth_mode, flush=True)
        time.sleep(600)
        """)
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "MARK": mark}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    give_up = threading.Timer(180, process.kill)
    give_up.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the script has not started its servers in 180 s, or failed"
        num_documents, auth_mode = line.split()
        assert int(num_documents) > 50
        assert auth_mode == "token"
        assert len(marked(mark)) > 3
        addresses = {end.laddr.ip for one in marked(mark) for end in one.net_connections() if end.status == "LISTEN"}
        assert addresses
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    finally:
        give_up.cancel()
        process.kill()
        process.wait()
    deadline = time.monotonic() + 300  # Ray's agents first tell a server that has ended, for a minute or more
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert marked(mark) == []


def marked(mark: str) -> list[psutil.Process]:
    """Return running processes with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
