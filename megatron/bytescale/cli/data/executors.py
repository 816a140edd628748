"""Options of the executor that runs the tasks of ``bytescale data``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bytescale_ext.data.tasks.stages import ExecutorSettings

EXECUTORS: Final = ("local", "ray", "slurm")


def add_executor(parser: argparse.ArgumentParser, tasks: str) -> None:
    """Add the options of the executor; ``tasks``: help of ``--tasks``."""
    parser.add_argument("--tasks", type=int, metavar="N", help=tasks)
    parser.add_argument(
        "--concurrent-tasks", type=int, metavar="N", help="tasks that run at a time (default: the number of processors)"
    )
    parser.add_argument(
        "--memory-gb", type=float, default=4.0, metavar="G", help="memory of a task in GB (%(default)g)"
    )
    parser.add_argument("--executor", choices=EXECUTORS, default=EXECUTORS[0], help="runner of tasks (%(default)s)")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="cluster of Ray (default: start one here)")
    parser.add_argument("--slurm", nargs="+", default=[], metavar="KEY=VALUE", help="partition=P and options of sbatch")


def check_datatrove() -> None:
    """Raise ValueError unless datatrove and the packages that it needs here are installed."""
    missing = [name for name in ("datatrove", "regex") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{missing[0]} is needed: pip install 'bytescale-megatron[data]'")


def executor_settings(args: argparse.Namespace) -> ExecutorSettings:
    """Return the settings of the executor. Raises ValueError for bad options and missing packages."""
    check_datatrove()
    from bytescale_ext.data.tasks.stages import ExecutorSettings

    concurrent_tasks = os.cpu_count() or 1 if args.concurrent_tasks is None else args.concurrent_tasks
    if concurrent_tasks < 1:
        raise ValueError(f"--concurrent-tasks {concurrent_tasks}: give 1 or more")
    if args.tasks is not None and args.tasks < 1:
        raise ValueError(f"--tasks {args.tasks}: give 1 or more")
    if not (math.isfinite(args.memory_gb) and args.memory_gb > 0):
        raise ValueError(f"--memory-gb {args.memory_gb:g}: give a number above 0")
    options = tuple((key, value) for key, _, value in (option.partition("=") for option in args.slurm))
    if args.executor == "slurm" and "partition" not in dict(options):
        raise ValueError("--executor slurm needs a partition: give --slurm partition=P")
    if args.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--executor ray: Ray is not installed: pip install ray")
    if (args.slurm and args.executor != "slurm") or (args.ray_address and args.executor != "ray"):
        raise ValueError("--slurm and --ray-address need the --executor of the same name")
    return ExecutorSettings(args.executor, concurrent_tasks, args.ray_address, options, args.memory_gb)
