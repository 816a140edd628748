"""Compare our plans with verl's balancer on published lengths of conversations: time of a step over its lower bound.

    python scripts/bench/plan/balancers.py --verl seqlen_balancing.py --lengths conversation_trace.jsonl

``seqlen_balancing.py`` is ``verl/utils/seqlen_balancing.py`` of https://github.com/volcengine/verl. Its functions run
unchanged; the modules of verl that they do not use are empty here. The lengths are the 12,031 conversations of
Mooncake's trace, FAST25-release/traces/conversation_trace.jsonl of https://github.com/kvcache-ai/Mooncake: tokens of a
prompt and its answer. Neither file is part of this project.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.devices import device_cost
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.library.balancers import get_seqlen_balanced_partitions
from bytescale_ext.plan.library.steps import plan_step
from bytescale_ext.plan.step.sizes import Cluster

Split = Callable[[Sequence[float], int, bool], list[list[int]]]

STEPS = 5
SEQUENCES_PER_RANK = 16
CASES = ((8, 16384), (64, 16384), (8, 65536), (32, 65536), (64, 131072))
"""Ranks, and longest sequence of the step."""


@dataclass(frozen=True)
class Row:
    """Times over the lower bound of one case, mean over the steps.

    Attributes:
        num_ranks: data-parallel ranks.
        longest: longest sequence, and C of the plans without rings.
        verl: verl's balancer, over ranks and then into micro-batches.
        parts: the same with our function in place of verl's.
        whole: our plans without rings.
        rings: our plans with rings.
    """

    num_ranks: int
    longest: int
    verl: float
    parts: float
    whole: float
    rings: float


def verl_module(path: Path) -> Any:
    """Return verl's module of balancing functions."""
    for name, members in (
        ("verl", ()),
        ("verl.protocol", ("DataProto",)),
        ("verl.utils", ("tensordict_utils",)),
        ("verl.utils.device", ("get_device_name",)),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(members))
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("verl.utils.seqlen_balancing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_of_parts(lengths: Sequence[int], cluster: Cluster, cost: StageCost, split: Split, work: np.ndarray) -> float:
    """Return the seconds of a step whose sequences verl's rules distribute.

    Ranks get equal counts of equal work. All ranks have as many micro-batches as the fullest rank needs, and each rank
    splits its sequences into micro-batches of equal work.

    Args:
        lengths: tokens of each sequence.
        cluster: the ranks.
        cost: cost of the model.
        split: the partition function.
        work: verl's measure of the work of each sequence: [n].
    """
    owners = split(work.tolist(), cluster.num_ranks, True)
    tokens = [sum(lengths[index] for index in part) for part in owners]
    count = max(math.ceil(one / cluster.tokens_per_rank) for one in tokens)
    seconds = []
    for part in owners:
        micro_batches = split(work[part].tolist(), min(count, len(part)), False)
        sizes = np.array([lengths[index] for index in part], dtype=np.float64)
        seconds.append(
            len(micro_batches) * cost.both.g + float(cost.both.sequence_cost(sizes, np.ones(len(sizes))).sum())
        )
    return max(seconds)


def row_of(num_ranks: int, longest: int, lengths: np.ndarray, verl: Any) -> Row:
    """Return the row of one case; ``lengths``: tokens of all published sequences: [n]."""
    cost, random = device_cost().whole(), np.random.default_rng(0)
    short, cluster = lengths[lengths <= longest], Cluster(num_ranks, longest)
    found: list[tuple[float, ...]] = []
    for _ in range(STEPS):
        step = random.choice(short, SEQUENCES_PER_RANK * num_ranks, replace=False)
        sizes, bound = step.tolist(), lower_bounds(step.tolist(), cluster, [cost]).largest
        work = np.asarray(verl.calculate_workload(step), dtype=np.float64)
        plans = [replay(plan_step(sizes, cluster, cost, rings=rings), cost.both).makespan for rings in (False, True)]
        split: tuple[Split, Split] = (verl.get_seqlen_balanced_partitions, get_seqlen_balanced_partitions)
        times = [*(time_of_parts(sizes, cluster, cost, one, work) for one in split), *plans]
        found.append(tuple(one / bound for one in times))
    return Row(num_ranks, longest, *(statistics.mean(one) for one in zip(*found, strict=True)))


def table(rows: Sequence[Row]) -> str:
    """Return the table of the page."""
    head = "| ranks | longest | verl | verl with our partition | plans without rings | plans with rings |\n"
    lines = [
        f"| {row.num_ranks} | {row.longest:,} | {row.verl:.3f} | {row.parts:.3f} | {row.whole:.3f} | {row.rings:.3f} |"
        for row in rows
    ]
    return head + "|---|---|---|---|---|---|\n" + "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--verl", type=Path, required=True, help="verl/utils/seqlen_balancing.py of verl")
    parser.add_argument("--lengths", type=Path, required=True, help=".jsonl with input_length and output_length")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.lengths.read_text(encoding="utf-8").splitlines()]
    lengths = np.array([line["input_length"] + line["output_length"] for line in lines], dtype=np.int64)
    verl = verl_module(args.verl)
    print(f"{len(lengths):,} sequences of {lengths.mean():,.0f} tokens in the mean, at most {lengths.max():,}\n")
    print(table([row_of(num_ranks, longest, lengths, verl) for num_ranks, longest in CASES]))


if __name__ == "__main__":
    main()
