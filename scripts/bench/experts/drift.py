"""Compare placements of experts under drifting loads: balance, modelled time, moves and time of the planner.

    OMP_NUM_THREADS=1 python scripts/bench/experts/drift.py [--drift 0.02 0.05 0.1] [--seeds 3] [--json]

64 experts on 8 ranks of 12 slots. The popularity of an expert is log-normal, follows a slow random walk, and differs a
little between ranks. The experts of one rank are correlated, so some ranks are the home of several popular experts.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.placement import Floats, Ints
from bytescale_ext.plan.experts.replay import PLACEMENTS, PlacementSettings, replay_loads
from scripts.bench.progress import progress

EXPERTS, RANKS, SLOTS = 64, 8, 12
TOKENS = 8 * 32768 * 2
"""(token, expert) pairs of a step: 32,768 tokens of each rank, two experts for each token."""
THRESHOLD = 1.15
SHAPE = replace(LLAMA_7B, num_expert_layers=32, num_experts=EXPERTS, experts_per_token=2, expert_ffn_hidden=2 * 1376)


@dataclass(frozen=True)
class Drift:
    """Random walk of the loads.

    Attributes:
        step: share of the popularity that is new in each step.
        spread: standard deviation of the logarithm of the popularity.
        by_rank: standard deviation of its differences between ranks.
        alike: share of the popularity that the experts of one rank have in common.
    """

    step: float
    spread: float = 1.35
    by_rank: float = 0.3
    alike: float = 0.35


def drifting_loads(drift: Drift, steps: int, seed: int) -> Ints:
    """Return loads [steps, 1, ranks, experts] of one layer."""
    draw = np.random.default_rng(seed).normal
    own, common, of_ranks = draw(size=EXPERTS), draw(size=RANKS), draw(size=(RANKS, EXPERTS))
    rows = []
    for _ in range(steps):
        own, common, of_ranks = (
            np.sqrt(1 - drift.step**2) * value + drift.step * draw(size=value.shape)
            for value in (own, common, of_ranks)
        )
        mixed = np.sqrt(1 - drift.alike) * own + np.sqrt(drift.alike) * np.repeat(common, EXPERTS // RANKS)
        weights = np.exp(drift.spread * mixed + drift.by_rank * of_ranks)
        rows.append(np.floor(TOKENS / RANKS * weights / weights.sum(1, keepdims=True)).astype(np.int64))
    return np.stack(rows)[:, None]


def share_of_top_ten(loads: Ints) -> float:
    """Return the mean share of the ten most popular experts. ``loads``: [steps, 1, ranks, experts]."""
    totals: Floats = np.sort(loads.sum((1, 2)), axis=1) / loads.sum((1, 2)).sum(1, keepdims=True)
    return float(totals[:, -10:].sum(1).mean())


def figures(drift: float, steps: int, seeds: int) -> list[dict[str, object]]:
    """Return a row for each placement, means over the seeds."""
    cost = ExpertCost.of(SHAPE, flops=400e12, link_bytes=55e9)
    loads = [drifting_loads(Drift(drift), steps, seed) for seed in range(seeds)]
    rows: list[dict[str, object]] = []
    for name in PLACEMENTS:
        replays = [replay_loads(trace, PlacementSettings(name, SLOTS, THRESHOLD, 1, cost)) for trace in loads]
        planner = np.concatenate([run.planner_seconds for run in replays])
        rows.append({
            "drift": drift,
            "placement": name,
            "top_ten": round(float(np.mean([share_of_top_ten(trace) for trace in loads])), 3),
            "ratio_mean": round(float(np.mean([run.mean_ratio for run in replays])), 3),
            "ratio_p95": round(float(np.mean([run.late_ratio for run in replays])), 3),
            "step_ms": round(1e3 * float(np.mean([run.seconds.mean() for run in replays])), 3),
            "moves_per_step": round(sum(run.num_moves for run in replays) / (steps * seeds), 2),
            "planner_ms_mean": round(1e3 * float(planner.mean()), 3),
            "planner_ms_p95": round(1e3 * float(np.quantile(planner, 0.95)), 3),
        })  # fmt: skip
    return rows


def main() -> None:
    """Replay the loads and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drift", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="(0.02 0.05 0.1)")
    parser.add_argument("--steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    drifts = progress(args.drift, lambda drift: f"drift {drift:g}")
    rows = [row for drift in drifts for row in figures(drift, args.steps, args.seeds)]
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
