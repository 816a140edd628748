"""Compare predicted with measured steps of many strategies of one model, on CPU processes of this machine.

    .venv/bin/python scripts/bench/search/truth.py [--ranks 2] [--arms 14] [--rounds 3] [--json]
    sudo .venv/bin/python scripts/bench/search/truth.py --cluster --ranks 8 --rounds 2  # emulated: Linux, root

``bytescale profile`` measures the model on all ranks, and ``bytescale search`` scores all strategies with that cost
file. Strategies of different kinds, spread from the fastest to the slowest, are trained as with ``--verify``: several
times each, in rounds that alternate between forward and reverse order. Strategies with which the ranks run the
same work count once, such as a policy that has nothing to do.

``--cluster`` trains on an emulated cluster (``scripts/cluster/emulate.py``). Each rank has a network namespace and a
fixed share of a core, so there may be more ranks than cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.search.costed import CostedStrategy
from bytescale_ext.plan.search.explore import ScoredStrategy, explore
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import KEEP, PRICED, Strategy
from bytescale_ext.plan.search.task import Task
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale import cli
from megatron.bytescale.cli.search.script import ScriptedRun
from megatron.bytescale.cli.search.task import task_of
from megatron.bytescale.cli.search.verify import (
    Train,
    Verified,
    correlation,
    reason,
    verified,
    verified_text,
    with_metrics,
)
from scripts.bench.cluster.cases import CORES_SHARE
from scripts.bench.cluster.predict import wall_cost
from scripts.bench.cluster.speed import profile_ranks
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, printed_by
from scripts.cluster.emulate import BEFORE_TRAINING, check_machine, run
from scripts.cluster.ranks import Launch, preload
from scripts.cluster.topology import Topology

MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer "
    "--vocab-size 256 --cpu"
)
TASK = "--sampler github --seq-length 4K --global-batch-size 16 --device-memory-gb 4 --steps 5"
CLUSTER_TASK = "--sampler github --seq-length 8K --global-batch-size 32 --device-memory-gb 4 --steps 4"
MOST_TOKENS = 2048
"""Largest micro-batch of the profile."""
MOST_SECONDS = 900.0
"""Time limit of a training."""


def profile(num_ranks: int, output: Path) -> None:
    """Profile the model on all ranks and write the cost file. Raises RuntimeError if that fails."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    bytescale = str(Path(sys.executable).parent / "bytescale")
    words = ["profile", "--output", str(output), "--max-tokens", str(MOST_TOKENS), "--", *MODEL.split()]
    printed_by([*ranks, "--no-python", bytescale, *words])


def profile_cluster(topology: Topology, folder: Path) -> ModelCost:
    """Profile the model on all ranks of an emulated cluster, in wall time. Raises RuntimeError if that fails."""
    return wall_cost(profile_ranks(topology, MODEL.split(), MOST_TOKENS, folder), topology)


def on_cluster(topology: Topology) -> Train:
    """Return a function that trains a strategy on an emulated cluster."""

    def train(of: ScriptedRun, words: Sequence[str], folder: Path, row: Verified) -> Verified:
        command = (str(ROOT / "pretrain_gpt_hdp.py"), *of.flags(), *words)
        launch = Launch(command, folder, BEFORE_TRAINING, MOST_SECONDS, is_warm=True)
        code = run(topology, launch).code
        if code:
            return replace(row, failure=reason(launch.log(0).read_text(errors="replace"), code))
        return with_metrics(row, folder)

    return train


def kind(strategy: Strategy) -> tuple[object, ...]:
    """Return the properties that strategies of one kind share."""
    return (strategy.tensor_parallel, strategy.num_stages, strategy.tokens_per_rank, strategy.chunks,
            strategy.chooses_slices, strategy.activations)  # fmt: skip


def fastest_of_kinds(task: Task, space: Space) -> list[ScoredStrategy]:
    """Return the fastest strategy of each kind, fastest first."""
    *_, frontier = explore([task], space.branches(task), sys.maxsize)
    fastest: dict[tuple[object, ...], ScoredStrategy] = {}
    for scored in frontier.found:
        fastest.setdefault(kind(scored.strategy), scored)
    return list(fastest.values())


def executed(task: Task, strategy: Strategy) -> tuple[object, ...]:
    """Return a key of the work of the ranks: equal for strategies that differ only in settings without effect."""
    case = CostedStrategy.of(task, strategy)
    slicings = tuple(case.plan(step).slicing or ONE_SLICE for step in task.steps)
    policies = [case.forecast.under_policy(slicing) for slicing in slicings]
    keeps_all = all(policy is None or policy.keeps_all for policy in policies)
    kept = KEEP if strategy.activations == PRICED and keeps_all else strategy.activations
    return strategy.tensor_parallel, strategy.stage_layers, strategy.tokens_per_rank, strategy.chunks, slicings, kept


def different(task: Task, scored: Sequence[ScoredStrategy]) -> list[ScoredStrategy]:
    """Return the strategies whose ranks run different work; the first of equal ones stays."""
    distinct: dict[tuple[object, ...], ScoredStrategy] = {}
    for row in scored:
        distinct.setdefault(executed(task, row.strategy), row)
    return list(distinct.values())


def in_rounds(trained: Sequence[Sequence[Verified]]) -> tuple[list[Verified], dict[str, float]]:
    """Return the median of each strategy over the rounds, and the spread of the rounds.

    ``trained`` holds the rows of each round, in the order of the search. A strategy that fails once has failed. The
    spread of a strategy is half the range of its times, over their median.
    """
    rows, spreads = [], []
    for rounds in zip(*trained, strict=True):
        failed = [row for row in rounds if row.seconds is None or row.gb is None]
        seconds = [row.seconds for row in rounds if row.seconds is not None]
        if failed:
            rows.append(failed[0])
            continue
        middle = statistics.median(seconds)
        spreads.append((max(seconds) - min(seconds)) / 2 / middle)
        rows.append(replace(rounds[0], seconds=middle))
    if not spreads:
        return rows, {}
    return rows, {"median_spread": statistics.median(spreads), "worst_spread": max(spreads)}


def train_all(
    search: argparse.Namespace, task: Task, scored: Sequence[ScoredStrategy], rounds: int, train: Train | None = None
) -> list[list[Verified]]:
    """Train all strategies once in each round, every other round in reverse; return the rows of each round."""
    trained = []
    for number in progress(range(rounds), lambda number: f"round {number + 1} of {len(scored)} trainings"):
        rows = verified(search, task, scored if number % 2 == 0 else scored[::-1], train)
        in_order = rows if number % 2 == 0 else rows[::-1]
        trained.append([replace(row, number=place) for place, row in enumerate(in_order, 1)])
    return trained


def spread(scored: Sequence[ScoredStrategy], count: int) -> list[ScoredStrategy]:
    """Return ``count`` strategies at even distances, with the first and the last."""
    return [scored[round(place)] for place in sorted(set(np.linspace(0, len(scored) - 1, count).round().tolist()))]


def summary(rows: Sequence[Verified]) -> dict[str, float | None]:
    """Return the errors of the predictions. Raises ValueError if no strategy ran."""
    ran = [(row, row.seconds, row.gb) for row in rows if row.seconds is not None and row.gb is not None]
    if not ran:
        raise ValueError("no strategy ran")
    first = next((seconds for row, seconds, _ in ran if row.number == 1), None)
    memory = [abs(row.predicted_gb / gb - 1.0) for row, _, gb in ran]
    return {
        "strategies": len(ran),
        "rank_correlation": correlation(rows),
        "choice_over_best": None if first is None else first / min(seconds for _, seconds, _ in ran),
        "median_time_error": statistics.median(abs(row.predicted_seconds / seconds - 1.0) for row, seconds, _ in ran),
        "median_memory_error": statistics.median(memory),
        "worst_memory_error": max(memory),
    }


def main() -> None:
    """Profile, search, train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes, at most one per core (2)")
    parser.add_argument("--arms", type=int, default=14, metavar="N", help="strategies to train (14)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="trainings of each strategy (3)")
    parser.add_argument("--cluster", action="store_true", help="emulate a cluster of one node with these ranks")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args()
    cores, train = os.cpu_count() or 1, None
    topology = Topology(1, args.ranks, cores_per_rank=min(1.0, CORES_SHARE * cores / args.ranks))
    if args.cluster:
        try:
            check_machine(topology)
        except ValueError as error:
            parser.error(str(error))
        preload()
        train = on_cluster(topology)
    elif args.ranks > cores:
        parser.error(f"--ranks {args.ranks}: each rank needs a core, and there are {cores}")
    with tempfile.TemporaryDirectory() as folder:
        cost = Path(folder) / "cost.json"
        for _ in progress(["profile of the ranks"]):
            if args.cluster:
                write_cost(cost, profile_cluster(topology, Path(folder) / "profile"))
            else:
                profile(args.ranks, cost)
        given = CLUSTER_TASK if args.cluster else TASK
        words = ["search", "--model-flags", MODEL, *given.split(), "--ranks", str(args.ranks), "--cost-file", str(cost)]
        search = cli.parse(words)
        task = task_of(search)
        arms = spread(different(task, fastest_of_kinds(task, Space())), args.arms)
        rows, spreads = in_rounds(train_all(search, task, arms, args.rounds, train))
    figures = summary(rows) | spreads
    if args.json:
        print(json.dumps({"strategies": [asdict(row) for row in rows], "summary": figures}))
        return
    print(verified_text(rows))
    print(", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in figures.items() if value is not None))


if __name__ == "__main__":
    main()
