"""Measure processor time and memory of cleaning and sculpting on short documents, and the quality of windows.

    .venv/bin/python scripts/bench/data/scale.py near --documents 100000 --tasks 4 [--json]
    .venv/bin/python scripts/bench/data/scale.py sculpt --documents 100000 --tasks 4 [--together] [--json]

A document has 20 to 60 made-up words, half of them from one of 1,000 topics. ``near``: a tenth of the
documents are copies with one changed word, and a twentieth are equal copies. Tasks run one after the other, each in a
process of its own, whose peak of memory is reported. ``--together`` also makes the windows of all documents in one
process and without partitions, and compares their relevance and fill.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.clean.stages import stages_of
from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.data.corpus.sculpting import REPORT, SculptJob, embedded_pieces, sculpt_stages
from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.samples.texts import encoder
from bytescale_ext.data.tasks.stages import Stage
from bytescale_ext.new_file import new_log
from bytescale_ext.plan.sculpt.quality import Quality, quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt

SEED = 1234
FILES = 32
TOPICS, TOPIC_WORDS, COMMON_WORDS = 1000, 40, 20_000
CONTEXT = 8192


@dataclass(frozen=True)
class StageCost:
    """Processor seconds of all tasks of a stage together, and the largest peak of memory of a task."""

    tasks: int
    seconds: float
    peak_mbytes: float


@dataclass
class Bench:
    """Figures of a run: costs by stage, and outcomes by name."""

    documents: int
    stages: dict[str, StageCost] = field(default_factory=dict)
    outcomes: dict[str, object] = field(default_factory=dict)


def texts(count: int, copies: bool, seed: int = SEED) -> Iterator[str]:
    """Yield made-up documents, with equal and changed copies of the last thousand if ``copies``."""
    random, recent = np.random.RandomState(seed), list[list[str]]()
    for number in range(count):
        kind = random.randint(20) if copies and number > 100 else 19
        if kind < 3:
            words = list(recent[random.randint(len(recent))])
            if kind < 2:
                words[random.randint(len(words))] = f"changed{number}"
        else:
            size = random.randint(20, 61)
            topic = random.randint(TOPICS)
            names = np.where(random.rand(size) < 0.5, 0, 1)
            numbers = np.where(names, random.randint(0, COMMON_WORDS, size), random.randint(0, TOPIC_WORDS, size))
            pairs = zip(names.tolist(), numbers.tolist(), strict=True)
            words = [f"common{word}" if is_common else f"t{topic}w{word}" for is_common, word in pairs]
            recent = [*recent[-999:], words]
        yield " ".join(words)


def run(stages: list[Stage], bench: Bench) -> None:
    """Run the tasks of each stage one after the other, each in a new process."""
    for stage in stages:
        costs = []
        for rank in range(stage.tasks):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                costs.append(pool.apply(run_task, (stage, rank)))
        seconds, peaks = zip(*costs, strict=True)
        bench.stages[stage.name] = StageCost(stage.tasks, sum(seconds), max(peaks))
        print(f"{stage.name}: {bench.stages[stage.name]}", file=sys.stderr)


def run_task(stage: Stage, rank: int) -> tuple[float, float]:
    """Run one task in this process, and return its processor seconds and its peak of memory in MB."""
    data: object = None
    began = time.process_time()
    for step in stage.steps:
        data = step(data, rank, stage.tasks)
    for _ in data if isinstance(data, Iterator) else ():
        pass
    return time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def near(count: int, tasks: int, memory_gb: float, folder: Path) -> Bench:
    """Clean documents with copies."""
    bench = Bench(count)
    source = Source("docs", str(folder / "texts"), "jsonl", "*.jsonl", ())
    Path(source.path).mkdir()
    streams = [new_log(Path(source.path) / f"{number:02d}.jsonl") for number in range(FILES)]
    for number, text in enumerate(texts(count, copies=True)):
        streams[number * FILES // count].write(json.dumps({"text": text}) + "\n")
    for stream in streams:
        stream.close()
    recipe = Recipe((source,), steps=("exact", "near"), tasks=tasks)
    run(stages_of(recipe, folder / "work", print, memory_gb)[:-1], bench)
    lines = [path.read_text().splitlines() for path in (folder / "work" / "duplicates").glob("*.jsonl")]
    bench.outcomes["dropped"] = sum(map(len, lines))
    return bench


def write_data_set(prefix: Path, count: int, seed: int) -> None:
    """Write documents as a data set of bytes."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    encode = encoder(None)
    write_tokens(prefix, (encode(text.encode())[0] for text in texts(count, copies=False, seed=seed)))


def windows(args: argparse.Namespace, folder: Path) -> Bench:
    """Make windows of documents; if ``args.together``, compare them with windows made without partitions."""
    bench, prefix, pieces = Bench(args.documents), folder / "docs", args.partition_pieces
    with multiprocessing.get_context("fork").Pool(1) as pool:  # Megatron would count in the memory of all tasks
        pool.apply(write_data_set, (prefix, args.documents, args.seed))
    settings = SculptSettings(CONTEXT, seed=args.seed)
    job = SculptJob(str(prefix), settings, None, folder / "work", folder / "docs.windows.npy", partition_pieces=pieces)
    job.work.mkdir()
    run(sculpt_stages(job, args.tasks), bench)
    bench.outcomes["partitions"] = job.num_partitions
    report = json.loads((job.work / REPORT).read_text())
    bench.outcomes |= {name: report[name] for name in Quality.__dataclass_fields__}
    if args.together:
        began = time.process_time()
        every = embedded_pieces(open_tokens(str(prefix)), CONTEXT, None, args.seed)
        whole = quality_of(sculpt(every, settings, nearest_centres).table, every, CONTEXT)
        ours = quality_of(np.load(job.output), every, CONTEXT)  # with the same vectors
        bench.outcomes |= {
            "together_seconds": time.process_time() - began,
            "relevance_to_together": ours.relevance / whole.relevance,
            "fill_to_together": ours.fill / whole.fill,
        }
    return bench


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("near", "sculpt"))
    parser.add_argument("--documents", type=int, default=100_000, metavar="N", help="number of documents (100000)")
    parser.add_argument("--tasks", type=int, default=4, metavar="N", help="tasks of a stage (4)")
    parser.add_argument("--memory-gb", type=float, default=4.0, metavar="G", help="memory of a task of cleaning (4)")
    parser.add_argument("--partition-pieces", type=int, default=1 << 12, metavar="N", help="of a partition (4096)")
    parser.add_argument("--together", action="store_true", help="compare with one process without partitions")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"of texts and windows ({SEED})")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.what == "near":
            bench = near(args.documents, args.tasks, args.memory_gb, Path(name))
        else:
            bench = windows(args, Path(name))
    if args.json:
        print(json.dumps(asdict(bench), indent=2))
        return 0
    print("| stage | tasks | processor seconds | MB of the largest task |\n|---|---|---|---|")
    for name, cost in bench.stages.items():
        print(f"| {name} | {cost.tasks} | {cost.seconds:.1f} | {cost.peak_mbytes:,.0f} |")
    for name, value in bench.outcomes.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
