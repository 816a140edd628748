"""Plans that learn, in wall time on the emulated cluster: real training, links and clocks, ranks of unequal speed.

    sudo .venv/bin/python scripts/bench/cluster/learn_wall.py [--json]          # about 20 minutes on 2 cores
    sudo .venv/bin/python scripts/bench/cluster/learn_wall.py --cases slow_node

Two nodes of four ranks on matched links train the small model of ``speed.py`` on the same documents in the same steps.
``bytescale profile`` measures the ranks first. Slow ranks have half the share of a core of the others. The last
steps of two runs are compared one by one. Only such ratios can be compared. Finished runs are kept, so a second start
continues where the first ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.cost_file import read_cost
from bytescale_ext.plan.cost.learned import UNLEARNED, LearnedCosts
from bytescale_ext.plan.cost.model_cost import ModelCost
from scripts.bench.cluster.cases import TOKENS_PER_RANK, Arm, Case
from scripts.bench.cluster.predict import wall_cost
from scripts.bench.cluster.speed import MODEL, PROFILED, Bench, launch_of, matched, profile_ranks
from scripts.bench.progress import progress
from scripts.cluster.emulate import check_machine, run
from scripts.cluster.ranks import preload
from scripts.cluster.topology import Slowdown

CASE = Case("github", 2, 4)
LAST = 8  # steps that count
WRONG = LearnedCosts(factors=(2.0, 1.0, 1.0, 1.0, 1 / 3))
"""Attention twice as slow and exchange three times as fast as they are."""
STALL = Slowdown((5,), 0.5, 5, 14)


@dataclass(frozen=True)
class Kind:
    """One training: the costs that it begins with, whether it learns, and slow ranks."""

    start: LearnedCosts = UNLEARNED
    learns: bool = True
    slow: Slowdown | None = None


NODE = Slowdown((4, 5, 6, 7), 0.5)
KINDS: dict[str, Kind] = {
    "fixed": Kind(learns=False),
    "learned": Kind(WRONG),
    "unlearned": Kind(WRONG, learns=False),
    "node": Kind(slow=NODE),
    "node-unaware": Kind(learns=False, slow=NODE),
    "stall": Kind(slow=STALL),
    "stall-unaware": Kind(learns=False, slow=STALL),
}
CASES: dict[str, tuple[str, ...]] = {
    "wrong_costs": ("fixed", "learned", "unlearned"),
    "slow_node": ("fixed", "node", "node-unaware"),
    "stalled_rank": ("fixed", "stall", "stall-unaware"),
}
"""Case -> its trainings."""

Steps = Sequence[Mapping[str, float]]
"""Logged figures of each step."""


def read_metrics(folder: Path, num_steps: int) -> Steps:
    """Return the figures of each step of a training, or nothing if it has not ended."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return lines if len(lines) == num_steps else []


def train(bench: Bench, kind: Kind, cost: ModelCost, folder: Path) -> Steps:
    """Train on the cluster. Raises RuntimeError if that fails."""
    topology = replace(CASE.topology(matched(cost)), slow=kind.slow)
    start = kind.start.of_model(wall_cost(cost, topology), cost.device)
    flags = ("--hdp-learn-costs", "on" if kind.learns else "off")
    launch = launch_of(bench, CASE, Arm("", flags, ring_forms="auto"), start, folder)
    ended = run(topology, launch)
    if ended.code:
        last = launch.log(0).read_text(errors="replace")[-1500:]
        raise RuntimeError(f"{folder} ended with exit code {ended.code}:\n{last.strip()}")
    return read_metrics(folder, bench.num_steps)


def over(mine: Steps, theirs: Steps, part: slice) -> list[float]:
    """Return the time of each step of one training over the time of the same step of another."""
    pairs = zip(mine[part], theirs[part], strict=True)
    return [one["tokens_per_second"] ** -1 * other["tokens_per_second"] for one, other in pairs]


def figures(runs: Mapping[str, Steps], case: str) -> dict[str, list[float]]:
    """Return the figures of a case. *Of speeds*: throughput over what the sum of speeds allows, by ``fixed``."""
    last, fixed = slice(-LAST, None), runs["fixed"]
    if case == "wrong_costs":
        aware = runs["learned"]
        found = {"over_profiled": over(aware, fixed, last), "without_learning": over(runs["unlearned"], fixed, last)}
    elif case == "slow_node":
        aware, half = runs["node"], 1 - len(NODE.ranks) * (1 - NODE.speed) / CASE.num_ranks
        found = {
            "over_unaware": over(runs["node-unaware"], aware, last),
            "of_speeds": [1 / (half * ratio) for ratio in over(aware, fixed, last)],
        }
    else:
        aware, stalled = runs["stall"], slice(STALL.last - 4, STALL.last)
        share = 1 - len(STALL.ranks) * (1 - STALL.speed) / CASE.num_ranks
        found = {
            "over_unaware": over(runs["stall-unaware"], aware, stalled),
            "of_speeds": [1 / (share * ratio) for ratio in over(aware, fixed, stalled)],
            "after_recovery": over(aware, fixed, last),
        }
    found["predicted_over_measured"] = [step["predicted_over_measured"] for step in aware[last]]
    found["imbalance"] = [step["measured_imbalance"] for step in aware[last]]
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="run these cases (all)")
    parser.add_argument("--steps", type=int, default=28, help="steps of each training (%(default)s)")
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
    cost, runs = read_cost(file), dict[str, Steps]()
    wanted = list(dict.fromkeys(name for case in args.cases for name in CASES[case]))
    for name in progress(wanted):
        folder = bench.run_folder(CASE, name, args.seed)
        runs[name] = read_metrics(folder, bench.num_steps) or train(bench, KINDS[name], cost, folder)
    found = {case: figures(runs, case) for case in args.cases}
    if not args.json:
        print("| case | figure | lowest | median | highest |\n|---|---|---|---|---|")
        for case, rows in found.items():
            for figure, values in rows.items():
                cells = f"{min(values):.3f} | {median(values):.3f} | {max(values):.3f}"
                print(f"| {case.replace('_', ' ')} | {figure.replace('_', ' ')} | {cells} |")
    print(json.dumps({case: {key: round(median(row), 4) for key, row in rows.items()} for case, rows in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
