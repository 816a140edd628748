"""Measure hybrid data parallelism against simpler plans, or pipelines in slices against whole micro-batches.

    .venv/bin/python scripts/bench/plan/hdp_e2e.py [--pipeline-parallel p] [--json]

All arms train the demo's model on the demo's corpus, with the same documents in the same steps and the same code.
``hdp`` balances seconds that its ranks measure first (``bytescale profile``, ``--cost-file``). ``naive`` balances
tokens instead of work (``--hdp-balance none``). ``static`` splits every document over all D ranks, as
``--context-parallel-size D`` does. The arms take turns, so a slow minute of the machine affects all of them. Each rank
has its own GPU or its own core, and there are at most four ranks: two ranks on one core would wait for each other
without loss.

With ``--pipeline-parallel p`` the ranks are pipelines of p stages, and the arms are ``slices`` (4 slices), the same
slices with stages two forwards ahead of each other, and ``1f1b``, all with the balance planner.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.features.slices.flags import flags_of
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, in_turns, printed_by
from scripts.demo import CONTEXT, Demo, build_corpora, num_gpus, read_metrics

MOST_RANKS = 4
FIGURES = ("tokens_per_second", "megabytes_sent_per_step", "attention_calls_per_step", "measured_imbalance")


def arm_flags(cost: Path, num_ranks: int, num_stages: int = 1) -> dict[str, list[str]]:
    """Return the flags that each arm adds to the training command; the first arm is compared with the others."""
    balanced = ["--cost-file", str(cost)]
    if num_stages == 1:
        static = ["--hdp-static-width", str(num_ranks)]
        return {"hdp": balanced, "naive": ["--hdp-balance", "none"], "static": static}
    tokens = str(max(int(CONTEXT[1]) // 4, -(-int(CONTEXT[1]) * num_stages // num_ranks)))
    piped = [*balanced, "--pipeline-model-parallel-size", str(num_stages), "--hdp-tokens-per-rank", tokens]
    slices = Slicing(4)
    ahead = slices.in_eager_order()
    return {ahead.order: [*piped, *flags_of(ahead)], "slices": [*piped, *flags_of(slices)], "1f1b": piped}


def measure_cost(demo: Demo, path: Path) -> None:
    """Profile the demo's model on all its ranks and write the cost file."""
    torchrun, script = demo.command[: -1 - len(demo.flags)], str(Path(sys.executable).parent / "bytescale")
    settings = ["--output", str(path), "--max-tokens", "4096", "--repeats", "3"]
    printed_by([*torchrun, "--no-python", script, "profile", *settings, "--", *demo.flags])


def run_arm(demo: Demo, flags: list[str], num_steps: int) -> list[dict[str, Any]]:
    """Train one arm and return the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--train-iters", str(num_steps), "--hdp-log-dir", folder, "--tensorboard-dir", folder]
        printed_by([*demo.command, *settings, *flags])
        return read_metrics(Path(folder) / "metrics.jsonl")


def compare(steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of each arm over its steps, and the ratios of the first arm to the others."""
    ours, *others = steps
    median = {
        arm: {name: statistics.median(step[name] for step in metrics) for name in FIGURES}
        for arm, metrics in steps.items()
    }
    return {
        "num_steps": len(steps[ours]),
        "arms": median,
        "speedup": {arm: _speedup(steps[ours], steps[arm]) for arm in others},
        "largest_loss_difference": max(
            abs(a["lm loss"] - b["lm loss"]) / b["lm loss"]
            for arm in others
            for a, b in zip(steps[ours], steps[arm], strict=True)
        ),
    }


def _speedup(ours: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratio of two arms' tokens per second, step by step on the same documents."""
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, other, strict=True)]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def main() -> int:
    """Run the arms in turn, print the table and, with ``--json``, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="one for each GPU or core, at most 4")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="pipeline stages (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run; the first does not count (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each arm (%(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    on_cpu = num_gpus() < 2
    available = (os.cpu_count() or 2) if on_cpu else num_gpus()
    num_ranks = args.ranks or min(max(2, available), MOST_RANKS)
    demo = Demo(num_ranks, on_cpu, folder=ROOT / "runs" / "demo")
    build_corpora(demo, partial(print, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        cost = Path(folder) / "cost.json"
        measure_cost(demo, cost)
        arms = arm_flags(cost, num_ranks, args.pipeline_parallel)
        steps: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _, arm in progress(in_turns(list(arms), args.rounds), lambda turn: f"{turn[1]}, round {turn[0] + 1}"):
            steps[arm] += run_arm(demo, arms[arm], args.steps)[1:]  # the first step warms up
    figures = compare(steps)
    print(f"{num_ranks} {demo.device} processes, {args.pipeline_parallel} stages, {os.cpu_count()} cores")
    print(f"{'':10}{'tokens/s':>12}{'MB sent/step':>14}{'attention calls/step':>22}{'imbalance':>11}")
    for arm, values in figures["arms"].items():
        print(
            f"{arm:10}{values['tokens_per_second']:12,.0f}{values['megabytes_sent_per_step']:14.1f}"
            f"{values['attention_calls_per_step']:22,.0f}{values['measured_imbalance']:11.2f}"
        )
    ours = next(iter(arms))
    for arm, ratio in figures["speedup"].items():
        print(
            f"{ours} over {arm}: {ratio['median']:.2f}x (median of {figures['num_steps']} steps on the same documents, "
            f"{ratio['lowest']:.2f} to {ratio['highest']:.2f})"
        )
    print(f"losses of the arms differ by at most {figures['largest_loss_difference']:.1e}")
    if args.json:
        print(json.dumps({"num_ranks": num_ranks, "num_stages": args.pipeline_parallel, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
