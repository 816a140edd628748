"""Try points of all faults, and write the table of docs/results/faults.md: python -m tests.faults --points 20.

Points in the file of results are not tried again. Faults of the network and of the disk need root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil

from scripts.cluster.emulate import cluster, ended_by_signals
from scripts.cluster.topology import Topology
from tests.cluster.test_emulate import LACKS
from tests.e2e.corpora import VOCAB
from tests.e2e.runs.test_remote import start_cluster
from tests.faults.jobs import LENGTHS, write_data
from tests.faults.points import FAULTS, NUM_RANKS, Point, point_of
from tests.faults.table import with_table
from tests.faults.trials import Tried, Undisturbed, try_point, undisturbed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "faults.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Try the points without results; return 1 if a point has problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20, help="points of each fault (%(default)s)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="faults to try (all)")
    parser.add_argument("--results", type=Path, default=Path("runs/faults/results.json"), help="(%(default)s)")
    args = parser.parse_args(argv)
    results = [Tried(**row) for row in json.loads(args.results.read_text())] if args.results.exists() else []
    done = {trial.name for trial in results}
    points = [point_of(fault, number) for number in range(args.points) for fault in args.faults]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        contextlib.ExitStack() as stack,
    ):
        trials = Trials(Path(folder), stack)
        for point in (point for point in points if point.name not in done):
            if FAULTS[point.fault].needs_root and LACKS:
                print(f"{point.name}: not tried: {LACKS}")
                continue
            tried = trials.run(point)
            results.append(tried)
            args.results.write_text(json.dumps([asdict(trial) for trial in results], indent=1))
            print(f"{point.name} {point.layout}: {'; '.join(tried.problems) or 'as expected'}", flush=True)
            PAGE.write_text(with_table(PAGE.read_text(), results))
    return int(any(trial.problems for trial in results))


class Trials:
    """The data of all points in a folder, and the reference runs without faults."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """``stack`` ends the Ray cluster, which starts with the first point that needs it."""
        self.folder, self.stack = folder, stack
        self.undisturbed: dict[tuple[str, str, bool], Undisturbed] = {}

    def run(self, point: Point) -> Tried:
        """Try a point, after its reference run."""
        remote = point.fault == "ray"
        key = point.layout, point.ckpt_format, remote
        of_key = self.folder / "-".join(map(str, key))
        data = self.remote_data if remote else [of_key / "docs"]
        if key not in self.undisturbed:
            of_key.mkdir()
            write_data(point, of_key)
            self.undisturbed[key] = undisturbed(point, data, of_key)
        place = self.folder / point.name
        place.mkdir()
        with contextlib.ExitStack() as network:
            topology = None
            if FAULTS[point.fault].needs_root:
                topology = Topology(NUM_RANKS, 1, name="bsfaults")
                network.enter_context(cluster(topology))
            tried = try_point(point, data, self.undisturbed[key], place, topology)
        shutil.rmtree(place)
        return tried

    @cached_property
    def remote_data(self) -> list[object]:
        """Flags of data that actors of a Ray cluster load."""
        text, draw = self.folder / "ids.jsonl", np.random.default_rng(0)
        documents = [draw.integers(0, VOCAB - 1, length) for length in LENGTHS]
        text.write_text("".join(f'{{"ids": "{" ".join(map(str, ids))}"}}\n' for ids in documents))
        address = self.stack.enter_context(ray_cluster(self.folder))
        return [text, "--hdp-loader", "ray", "--hdp-ray-address", address, "--hdp-ray-servers", 1, "--hdp-json-key",
                "ids"]  # fmt: skip


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """Start a Ray cluster of one node and yield its address."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # as in the cluster; ranks inherit it
    address, process, log = start_cluster(folder)
    assert process.poll() is None, log.read_text()
    started = [process, *psutil.Process(process.pid).children(recursive=True)]
    try:
        yield address
    finally:
        process.terminate()
        for alive in psutil.wait_procs(started, timeout=30)[1]:
            alive.kill()


if __name__ == "__main__":
    sys.exit(main())
