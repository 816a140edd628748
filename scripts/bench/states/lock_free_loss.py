#!/usr/bin/env python3
"""Train a small model of bytes with exact and with lock-free updates of Adam, and compare losses.

    python scripts/bench/states/lock_free_loss.py --data data/python

All arms of a seed have the same weights and documents; they differ in ``--state-update`` alone. Printed are the mean
loss of the last steps of each seed, and the ratio of each arm's loss to that of exact updates (median of seeds).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from megatron.bytescale.cli.shared.inputs import count  # noqa: E402
from scripts.bench.states.ngram_loss import FFN, LAST, train  # noqa: E402

PAGED = ["--ffn-hidden-size", str(FFN), "--bf16", "--state-policy", "paged", "--state-page-mb", "0.0625"]
LATE = [*PAGED, "--state-update", "lock-free", "--state-update-steps"]
ARMS = {"exact": PAGED, **{f"lock-free, {number} step(s)": [*LATE, str(number)] for number in (1, 4)}}


def measure(
    data: str, steps: int, seeds: int, rate: float, run: Callable[[Sequence[str], int, Path], list[float]] = train
) -> dict[str, list[float]]:
    """Return the mean loss of the last steps of each seed, by arm; prints each when it is known."""
    losses: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(seeds):
        for name, flags in ARMS.items():
            given = [*flags, "--data-path", data, "--seed", str(1234 + seed)]
            given += ["--train-iters", str(steps), "--lr-decay-iters", str(steps)]
            given += ["--lr", str(rate), "--min-lr", str(rate / 10)]
            with tempfile.TemporaryDirectory() as folder:
                losses[name].append(statistics.mean(run(given, 1, Path(folder))[-LAST:]))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    return losses


def main() -> int:
    """Measure and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a data set of bytes (`bytescale corpus`)")
    parser.add_argument("--steps", type=count, default=120, metavar="N", help="of a training (120)")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="trainings of each arm (3)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (0.003)")
    args = parser.parse_args()
    losses = measure(args.data, args.steps, args.seeds, args.lr)
    for name, found in losses.items():
        ratios = [one / exact for one, exact in zip(found, losses["exact"], strict=True)]
        print(f"{name}: mean {statistics.mean(found):.4f}, {statistics.median(ratios):.4f} times exact "
              f"({min(ratios):.4f} to {max(ratios):.4f})")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
