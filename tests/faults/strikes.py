"""Faults inside a rank, and the record of each rank's steps."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from scripts.cluster.topology import Topology
from tests.faults.points import LOSS_SECONDS, Point

TIMEOUT_SECONDS = 10.0
"""Replaces ``--distributed-timeout-minutes``, which is at least a minute."""
SAVE_SECONDS = 0.2
PASS_SECONDS = 0.1
"""Seconds of a backward pass on a normal rank."""
SLOW_TIMES = 3.0
SLOT_SECONDS = 0.02
LOSS_SHARE = 0.3
_CONTINUE_LATER = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def record_steps(runtime: Any, folder: Path, rank: int) -> None:
    """Append the documents of each step to a file when the step begins."""
    mark, recorded = runtime.parts.clock.mark, None

    def mark_and_record(kind: str, micro_batch: int | None = None) -> None:
        nonlocal recorded
        mark(kind, micro_batch)
        step = runtime.step.batch
        if step is None or step is recorded:
            return
        recorded = step
        documents = {
            str(shard.seq): name
            for packed in step.micro_batches
            for shard, name in zip(packed.micro_batch.shards, packed.documents, strict=True)
        }
        with (folder / f"steps-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step.step_index + 1, "documents": documents}) + "\n")

    runtime.parts.clock.mark = mark_and_record


def prepare(point: Point, runtime: Any, topology: Topology | None, struck: Path) -> None:
    """Prepare the fault of this rank; the fault writes its time to ``struck``."""
    actions: dict[str, Callable[[], None]] = {
        "killed": kill,
        "killed-paged": kill,
        "cut-short": kill,
        "stopped": partial(stop_for, TIMEOUT_SECONDS + 3),
        "planner": kill_planner,
        "ray": partial(kill_actor, "server-0" if point.share < 0.5 else "scheduler"),
    }
    if topology is not None:
        actions["cut-link"] = partial(set_link, topology, point.rank, False)
        actions["packet-loss"] = partial(lose_packets, topology, point.rank, point.number)

    def strike(action: Callable[[], None]) -> None:
        struck.write_text(str(time.time()))
        action()

    if point.fault in actions:
        strike_at(point, runtime, partial(strike, actions[point.fault]))
    elif point.fault == "killed-saving":
        kill_in_save(point, partial(strike, kill))


def strike_at(point: Point, runtime: Any, strike: Callable[[], None]) -> None:
    """Call ``strike`` at the clock's mark of the point."""
    mark = runtime.parts.clock.mark
    num_marks, struck = 0, False

    def mark_and_strike(kind: str, micro_batch: int | None = None) -> None:
        nonlocal num_marks, struck
        mark(kind, micro_batch)
        if struck or runtime.step.batch is None or runtime.step.batch.step_index + 1 != point.step:
            return
        num_marks += kind == point.mark
        if num_marks > point.nth or kind == "end":
            struck = True
            threading.Timer(point.delay, strike).start()

    runtime.parts.clock.mark = mark_and_strike


def kill() -> None:
    """End this rank."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float) -> None:
    """Stop this rank; another process continues it after some seconds."""
    subprocess.Popen([sys.executable, "-S", "-c", _CONTINUE_LATER, str(os.getpid()), str(seconds)])
    os.kill(os.getpid(), signal.SIGSTOP)


def stretch(runtime: Any, seconds: float) -> None:
    """Extend each backward pass of a micro-batch to ``seconds``, which the load of the machine hardly changes."""
    mark, end = runtime.parts.clock.mark, 0.0

    def mark_and_stretch(kind: str, micro_batch: int | None = None) -> None:
        nonlocal end
        time.sleep(max(0.0, end - time.perf_counter()))
        mark(kind, micro_batch)
        end = time.perf_counter() + seconds if kind == "backward" else 0.0

    runtime.parts.clock.mark = mark_and_stretch


def set_link(topology: Topology, rank: int, is_up: bool) -> None:
    """Let the switch forward or silently drop the packets from and to a rank."""
    command = ["ip", "-n", topology.switch, "link", "set", f"port{rank}"]
    subprocess.run([*command, *(["master", "bridge"] if is_up else ["nomaster"])], check=True)


def lose_packets(topology: Topology, rank: int, seed: int) -> None:
    """Drop all packets of a rank in random slots of time."""
    draw, end = random.Random(seed), time.monotonic() + LOSS_SECONDS
    while time.monotonic() < end:
        set_link(topology, rank, draw.random() >= LOSS_SHARE)
        time.sleep(SLOT_SECONDS)
    set_link(topology, rank, True)


def kill_planner() -> None:
    """End the process that makes this rank's plans."""
    planners = [child for child in psutil.Process().children() if "plan_worker" in " ".join(child.cmdline())]
    for planner in planners:
        planner.kill()
    assert planners, "no process plans"


def kill_actor(name: str) -> None:
    """End an actor of the Ray loader."""
    import ray

    from bytescale_ext.data.ray.fetching import fetch

    os.kill(fetch(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def kill_in_save(point: Point, strike: Callable[[], None]) -> None:
    """Strike during the first save after the point's step."""
    from megatron.training import training

    save = training.save_checkpoint

    def save_and_die(iteration: int, *args: Any, **kwargs: Any) -> None:
        if iteration >= point.step:
            threading.Timer(SAVE_SECONDS * point.share, strike).start()
        save(iteration, *args, **kwargs)

    training.save_checkpoint = save_and_die


def shorten_timeout() -> None:
    """Give process groups a timeout below a minute, the least of the command line."""
    from megatron.bytescale.arguments import parse

    original = parse.parse

    def parse_and_shorten(*args: Any) -> Any:
        parsed = original(*args)
        parsed.distributed_timeout_minutes = TIMEOUT_SECONDS / 60
        return parsed

    parse.parse = parse_and_shorten
