"""Compare the searched launch line with three other ways to choose one, by replays on one cost model, without a GPU.

    .venv/bin/python scripts/bench/plan/search.py [--cases "byted 256K" "github 64K"] [--json]

The model is a 7B on 64 H100 in nodes of 8, with published timings. The other ways pack documents on a static mesh:

- recipe: tensor parallelism fills a node, then the fewest stages and the narrowest mesh that fit.
- fixed-length search: tensor parallelism, stages, full recompute and ZeRO-1, as in Galvatron's published space, chosen
  by steps of samples that are as long as the context, each on one rank.
- table: the best of twelve lines that an engineer might write down.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from bytescale_ext.plan.search.costed import CostedStrategy
from bytescale_ext.plan.search.explore import explore
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import FULL, KEEP, Strategy
from bytescale_ext.plan.search.task import Devices, DoesNotFit, Task
from megatron.bytescale.cli.shared.inputs import size
from scripts.bench.progress import progress

CASES = ("byted 64K", "byted 256K", "github 64K", "github 256K")
DOCUMENTS = 512
STEPS = 4
SLOWDOWN = 6.0
"""Assumed: eight links of 400 Gbit/s of a node, against 308 GB/s of each device inside it."""
TABLE = ((1, 1, 8), (1, 1, 16), (1, 1, 32), (2, 1, 8), (2, 1, 16), (4, 1, 8), (8, 1, 8), (8, 1, 4), (2, 2, 8),
         (4, 2, 8), (8, 2, 4), (4, 4, 4))  # fmt: skip
"""(tensor parallelism, stages, width of the static mesh) of the engineer's lines."""


@dataclass(frozen=True)
class Choice:
    """A chosen launch line, its mean seconds of a step, and the processor seconds of the choice."""

    strategy: str
    seconds: float
    search_seconds: float


def task_of(sampler: str, context: int) -> Task:
    """Return the task of a case."""
    cost = replace(shipped("h100_7b"), slowdown=SLOWDOWN)
    steps = tuple(sample_documents(sampler, context, DOCUMENTS, seed) for seed in range(STEPS))
    return Task(cost, Devices(64, 8, 80e9, 100e9), context, steps)


def fitting(task: Task, meshes: Iterable[tuple[int, int, int]]) -> Iterator[CostedStrategy]:
    """Yield the case of each (tensor parallelism, stages, width), with full recompute if it does not fit without."""
    for tensor_parallel, stages, width in meshes:
        layers, tokens = (task.cost.shape.num_layers // stages,) * stages, task.context // width
        kept = Strategy(tensor_parallel, layers, tokens, shares_optimizer=True)
        cases = (static(task, strategy) for strategy in (kept, replace(kept, activations=FULL)))
        yield from [case for case in cases if case is not None][:1]


def static(task: Task, strategy: Strategy) -> CostedStrategy | None:
    """Return the case of a strategy on a static mesh that holds the context, or None if it does not fit."""
    try:
        case = CostedStrategy.of(task, strategy)
    except DoesNotFit:
        return None
    width = task.context // strategy.tokens_per_rank
    if case.planner.cluster.num_ranks % width:
        return None
    return replace(case, planner=replace(case.planner, static_width=width))


def seconds_of(case: CostedStrategy, task: Task) -> float:
    """Return the mean seconds of the steps."""
    return float(np.mean([case.run(step).seconds for step in task.steps]))


def recipe(task: Task) -> CostedStrategy:
    """Return the case of the usual recipe."""
    return next(fitting(task, ((8, stages, width) for stages in (1, 2, 4, 8) for width in (1, 2, 4, 8))))


def fixed_length(task: Task) -> CostedStrategy:
    """Return the fastest case on samples of the full context, each on one rank, one for each device."""
    samples = replace(task, steps=((task.context,) * task.devices.count,))
    space = Space(tokens_per_rank=(task.context,), activations=(KEEP, FULL), pipelines=("whole",), uneven=False)
    cases = [static(task, strategy) for strategy in space.strategies(task) if strategy.loss_tokens is None]
    return min((case for case in cases if case is not None), key=lambda case: seconds_of(case, samples))


def table(task: Task) -> CostedStrategy:
    """Return the case of the engineer's best line."""
    return min(fitting(task, TABLE), key=lambda case: seconds_of(case, task))


def compare(task: Task) -> dict[str, Choice]:
    """Return the choice of each way."""
    choices = {}
    for name, choose in (("recipe", recipe), ("fixed-length search", fixed_length), ("table", table)):
        began = time.process_time()
        case = choose(task)
        seconds = time.process_time() - began
        width = task.context // case.strategy.tokens_per_rank
        choices[name] = Choice(f"{case.strategy}, width {width}", seconds_of(case, task), seconds)
    began = time.process_time()
    *_, frontier = explore([task], Space().branches(task), 1)
    best = frontier.found[0]
    choices["search"] = Choice(str(best.strategy), best.seconds, time.process_time() - began)
    return choices


def text_of(case: str, choices: dict[str, Choice]) -> str:
    """Return the figures of a case as rows of a table."""
    best = choices["search"].seconds
    rows = []
    for name, choice in choices.items():
        figures = (f"{choice.seconds:.4g}", f"{choice.seconds / best:.2f}", f"{choice.search_seconds:.1f}")
        rows.append(f"| {' | '.join((case, name, choice.strategy, *figures))} |")
    return "\n".join(rows)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="'NAME CONTEXT'", help="sampler and context")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    results = {}
    for case in progress(args.cases):
        sampler, context = case.split()
        choices = compare(task_of(sampler, size(context)))
        results[case] = {name: asdict(choice) for name, choice in choices.items()}
        if not args.json:
            print(text_of(case, choices), flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
