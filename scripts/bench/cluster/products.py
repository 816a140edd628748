"""Check that the ranks of ``speed.py`` compute: the share of attention and matrix products in a static step.

    sudo .venv/bin/python scripts/bench/cluster/products.py [--case "byted 2x4 matched"]

The static arm of a case is trained with torch's profiler on rank 0, after ``speed.py`` has measured the ranks. Time in
operators, which includes pauses of the quota, is held against the processor time of the ranks' main threads over their
share of a core. The profiler's own work counts as other work, so the share is a lower bound.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from scripts.bench.cluster.cases import ARMS, Case  # noqa: E402
from scripts.bench.cluster.predict import wall_cost  # noqa: E402
from scripts.bench.cluster.results import Results  # noqa: E402
from scripts.bench.cluster.speed import TRACED_STEP, Bench, launch_of, matched, split_of  # noqa: E402
from scripts.cluster.ranks import preload  # noqa: E402

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"  # its backward begins with the same name
TARGET = 0.8


def product_seconds(trace: Path) -> float:
    """Return the time that a profile spent in attention and matrix products."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return 1e-6 * sum(
        event["dur"]
        for event in events
        if event.get("cat") == "cpu_op" and (event["name"] in PRODUCTS or event["name"].startswith(ATTENTION))
    )


def static_share(bench: Bench, results: Results, case: Case) -> float:
    """Return the share of attention and products in the computing time of a static step. Raises RuntimeError."""
    assert results.cost is not None
    topology, folder = case.topology(matched(results.cost)), bench.folder / "products" / "static"
    launch = launch_of(bench, case, ARMS["static"], wall_cost(results.cost, topology), folder)
    steps = ("--profile-step-start", str(TRACED_STEP - 1), "--profile-step-end", str(TRACED_STEP))
    profiled = (*launch.command, "--profile", "--use-pytorch-profiler", "--profile-ranks", "0", *steps)
    split = split_of(topology, replace(launch, command=profiled))
    return product_seconds(folder.parent / "torch_profile" / "rank-0.json.gz") / (split.computing * split.wall_seconds)


def main() -> int:
    """Train the static arm and print the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="byted 2x4 matched", help="as speed.py takes it (%(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "cluster" / "results.json", metavar="FILE")
    args = parser.parse_args()
    try:
        case, results = Case.parse(args.case), Results.read(args.results)
        if results.cost is None:
            raise ValueError(f"{args.results} holds no profile of the ranks: run speed.py first")
        bench = Bench(args.results.resolve().parent, int(results.setting["steps"]), int(results.setting["seed"]))
        preload()
        share = static_share(bench, results, case)
    except (ValueError, RuntimeError) as error:
        print(f"products.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(f"{case}: {share:.0%} of the static arm's computing time in attention and products (target {TARGET:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
