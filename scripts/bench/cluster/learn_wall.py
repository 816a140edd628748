"""Plans that learn, in wall time on the emulated cluster: real training, links and clocks, ranks of unequal speed.

    sudo .venv/bin/python scripts/bench/cluster/learn_wall.py [--json]          # about 15 minutes on 2 cores
    sudo .venv/bin/python scripts/bench/cluster/learn_wall.py --cases slow_node

Two nodes of two ranks on matched links train the small model of ``speed.py``. Slow ranks have half the share of a core
of the others. The two trainings of a case run at the same time on clusters of their own, with the same documents in the
same steps, because the speed of a shared machine changes by a third within minutes. Their steps are compared one by
one. ``bytescale profile`` measures the ranks first. Finished cases are kept, so a second start continues where the
first ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.cost_file import read_cost
from bytescale_ext.plan.cost.learned import UNLEARNED, LearnedCosts
from bytescale_ext.plan.cost.model_cost import ModelCost
from scripts.bench.cluster.cases import TOKENS_PER_RANK, Arm, Case
from scripts.bench.cluster.learn import print_figures
from scripts.bench.cluster.predict import wall_cost
from scripts.bench.cluster.speed import MODEL, PROFILED, Bench, launch_of, matched, profile_ranks
from scripts.bench.progress import progress
from scripts.cluster.emulate import check_machine, run
from scripts.cluster.ranks import preload
from scripts.cluster.topology import Slowdown

CASE = Case("github", 2, 2, context=4 * TOKENS_PER_RANK)
LAST = 6  # steps that count
WRONG = LearnedCosts(factors=(2.0, 1.0, 1.0, 1.0, 1 / 3))
"""Attention twice as slow and exchange three times as fast as they are."""
NODE = Slowdown((2, 3), 0.5)
STALL = Slowdown((1,), 0.5, 5, 14)


@dataclass(frozen=True)
class Kind:
    """One training: the costs that it begins with, whether it learns, and slow ranks."""

    start: LearnedCosts = UNLEARNED
    learns: bool = True
    slow: Slowdown | None = None


CASES: dict[str, tuple[Kind, Kind]] = {
    "wrong_costs": (Kind(WRONG), Kind(learns=False)),
    "slow_node": (Kind(slow=NODE), Kind(learns=False, slow=NODE)),
    "stalled_rank": (Kind(slow=STALL), Kind(learns=False, slow=STALL)),
}
"""Case -> a training that learns, and one that does not; *wrong costs* compares it with the costs of the profile."""

Steps = Sequence[Mapping[str, Any]]
"""Logged figures of each step."""


def read_metrics(folder: Path, num_steps: int) -> Steps:
    """Return the figures of each step of a training, or nothing if it has not ended."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return lines if len(lines) == num_steps else []


def train(bench: Bench, kind: Kind, cost: ModelCost, folder: Path, name: str) -> None:
    """Train on a cluster with this name, of half of the cores. Raises RuntimeError if that fails."""
    topology = CASE.topology(matched(cost))
    topology = replace(topology, slow=kind.slow, cores_per_rank=topology.cores_per_rank / 2, name=name)
    start = kind.start.of_model(wall_cost(cost, topology), cost.device)
    flags = ("--hdp-learn-costs", "on" if kind.learns else "off")
    launch = launch_of(bench, CASE, Arm("", flags, ring_forms="auto"), start, folder)
    ended = run(topology, launch)
    if ended.code:
        last = launch.log(0).read_text(errors="replace")[-1500:]
        raise RuntimeError(f"{folder} ended with exit code {ended.code}:\n{last.strip()}")


def train_both(bench: Bench, case: str, cost: ModelCost) -> tuple[Steps, Steps]:
    """Return the figures of both trainings of a case, which run at the same time. Raises RuntimeError if one fails."""
    folders = [bench.run_folder(CASE, f"{case}-{name}", bench.seed) for name in ("learns", "knows")]
    if not all(read_metrics(folder, bench.num_steps) for folder in folders):
        bench.documents(CASE)
        context = multiprocessing.get_context("fork")  # of this process, which has imported everything
        arguments = [
            (bench, kind, cost, folder, f"bytescale{number}")
            for number, (kind, folder) in enumerate(zip(CASES[case], folders, strict=True))
        ]
        processes = [context.Process(target=train, args=one) for one in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    learns, knows = (read_metrics(folder, bench.num_steps) for folder in folders)
    if not (learns and knows):
        raise RuntimeError(f"{case}: a training failed, see {folders[0].parent}")
    return learns, knows


def over(mine: Steps, theirs: Steps, part: slice) -> list[float]:
    """Return the time of each step of one training over the time of the same step of another."""
    pairs = zip(mine[part], theirs[part], strict=True)
    return [other["tokens_per_second"] / one["tokens_per_second"] for one, other in pairs]


def gain_of(speeds: Sequence[float]) -> float:
    """Return the gain of work in proportion to speeds over equal work."""
    return sum(speeds) / len(speeds) / min(speeds)


def figures(aware: Steps, other: Steps, case: str) -> dict[str, list[float]]:
    """Return the figures of a case. *Of speeds*: ``over_unaware`` over the gain that the learned speeds allow."""
    last = slice(-LAST, None)
    if case == "wrong_costs":
        found = {"over_profiled": over(aware, other, last)}
    else:
        part = last if case == "slow_node" else slice(STALL.last - 3, STALL.last)
        speeds, gains = [step["learned_costs"]["speeds"] for step in aware[part]], over(other, aware, part)
        allowed = [gain / gain_of(one) for gain, one in zip(gains, speeds, strict=True) if one]
        found = {"over_unaware": gains, "of_speeds": allowed or [0.0]}
        if case == "stalled_rank":
            found["after_recovery"] = over(aware, other, last)
    found["predicted_over_measured"] = [step["predicted_over_measured"] for step in aware[last]]
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="run these cases (all)")
    parser.add_argument("--steps", type=int, default=24, help="steps of each training (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and tokens (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/cluster/learn"), metavar="FOLDER",
                        help="folder of all runs (%(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one line of JSON only")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing trainings and print the figures; bad settings end with one line and exit code 2."""
    args = build_parser().parse_args(argv)
    try:
        if args.steps < STALL.last + LAST:
            raise ValueError(f"--steps {args.steps}: give {STALL.last + LAST} or more")
        check_machine(CASE.topology((1.0, 1.0)))
    except ValueError as error:
        print(f"learn_wall.py: error: {error}", file=sys.stderr)
        return 2
    preload()
    bench = Bench(args.folder, args.steps, args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / "profile" / "cost.json"
    for _ in progress(["profile of the ranks"] if not file.exists() else []):
        profile_ranks(PROFILED.topology((0.0, 0.0)), MODEL, TOKENS_PER_RANK // 2, file.parent)
    cost, found = read_cost(file), dict[str, dict[str, list[float]]]()
    for case in progress(args.cases):
        try:
            found[case] = figures(*train_both(bench, case, cost), case)
        except RuntimeError as error:
            print(f"learn_wall.py: error: {error}", file=sys.stderr)
            return 1
    print_figures(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
