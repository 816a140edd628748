"""``speed.py --device-times``: the real runtime in the times of a named device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripts.bench.cluster.virtual.bench import Results, run_all
from scripts.bench.cluster.virtual.cases import ARMS, DYNAMIC, FULL, QUICK, Planned
from scripts.bench.cluster.virtual.figures import all_figures, table
from scripts.bench.cluster.virtual.recording import Recording
from scripts.bench.cluster.virtual.times import DeviceTimes
from scripts.bench.report import ROOT
from scripts.cluster.ranks import preload

__all__ = ["ARMS", "run"]
FOLDER = ROOT / "runs" / "cluster" / "virtual"


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options of ``speed.py`` that mean nothing in virtual time, or a wrong ``--megatron``."""
    for name, value in (("--plot", args.plot), ("--rounds", args.rounds != 1), ("--cases", args.cases)):
        if value:
            raise ValueError(f"{name} is not for --device-times, whose cases and figures do not vary")
    if args.megatron is not None:
        from megatron.bytescale.cli.shared.megatron_dynamic import check_source

        check_source(args.megatron)


def planned(quick: bool, arms: list[str] | None, has_dynamic: bool) -> tuple[Planned, ...]:
    """Return the cases, with the named arms of each of them only.

    Raises ValueError if they name Megatron's dynamic plan, and ``has_dynamic`` is False.
    """
    if DYNAMIC in (arms or ()) and not has_dynamic:
        raise ValueError(f"--arms {DYNAMIC}: give --megatron, a source tree of Megatron with the scheduler")
    rows = QUICK if quick else FULL
    wanted = [arm for arm in arms or ARMS if arm != DYNAMIC or has_dynamic]
    return tuple(Planned(row.case, tuple(arm for arm in row.arms if arm in (row.arms[0], *wanted))) for row in rows)


def run(args: argparse.Namespace) -> None:
    """Run the missing arms, print the tables and, with ``--json``, one JSON object as the last line.

    Raises ValueError for bad options.
    """
    check(args)
    device = DeviceTimes.read(args.device_times)
    path = args.results or FOLDER / f"{device.name.lower()}.json"
    recording = Recording(Path(path).resolve().parent / "recordings", device, args.steps, args.seed, args.megatron)
    setting = {"device": device.name, "source": device.source, "steps": args.steps, "seed": args.seed}
    results = Results.open(Path(path), setting)
    rows = planned(args.quick, args.arms, args.megatron is not None)
    preload()
    run_all(recording, results, rows)
    for case, arms in results.cases.items():
        for links in next(iter(arms.values()))["steps"]:
            print(f"{case}, {links} Gbit/s between nodes, emulated with device times of {device.name}")
            print("\n".join(table(arms, links)) + "\n")
    if args.json:
        print(json.dumps(all_figures(results.cases)))
