"""Measure the processor time that a rank's loader takes for a step of many documents. No GPU.

    .venv/bin/python scripts/bench/data/loader.py --folder DIR [--documents 500000] [--ranks 12288] [--json]

DIR gets the data set of ``startup.py`` with ten million documents, which is read as in training: lengths, plan, check
and the tokens of one rank, two steps ahead in the loader's thread. The planner runs in a process of its own, which does
not count. Reported for the steps after the first: processor milliseconds of the loader's thread, of the step's own
thread (what logs, learned costs and overlapped reductions need of a step), and their largest functions with
``--profile``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import CheckedPlanner, PlanMaker, PlannerInProcess
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.cost.shards import CoupledShards
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.reductions import Overlaps
from bytescale_ext.plan.step.sizes import Cluster
from bytescale_ext.plan.step.table import shards_of_rank
from scripts.bench.data.startup import write_data_set

DATA_DOCUMENTS = 10**7
CONTEXT = 65536
SHAPE = ModelShape(32, 4096, 32, 8, 128, 14336, True, 32000)
RANK = 1
FACTS = Overlaps(RANK), CoupledShards(RANK)
FORWARD = CostModel(a=1e-12, b=1e-7, c=2e-8, g=1e-4)


@dataclass
class Timed:
    """Processor seconds of calls, and the profile of their functions; made in the thread that calls."""

    call: Callable[..., StepBatch]
    profiled: bool
    seconds: list[float] = field(default_factory=list)
    profile: cProfile.Profile = field(default_factory=cProfile.Profile)

    def __call__(self, *args: object) -> StepBatch:
        """Call, and return the result."""
        began = time.thread_time()
        if self.profiled:
            self.profile.enable()
        try:
            return self.call(*args)
        finally:
            self.profile.disable()
            self.seconds.append(time.thread_time() - began)


def of_step_thread(batch: StepBatch, rank: int) -> StepBatch:
    """Compute the figures of a step that training computes in its own thread, and return the step."""
    mine = shards_of_rank(batch.plan.ranks, rank)
    FORWARD.rank_cost(mine, batch.lengths)
    micro_batch_counts(batch.plan)
    model_flops(SHAPE, batch.lengths)
    _ = [batch.plan.fact(fact) for fact in FACTS]
    assert batch.num_tokens and len(batch.sample_ids)
    return batch


def measured(folder: Path, documents: int, ranks: int, steps: int, profiled: bool) -> dict[str, object]:
    """Return the figures of some steps."""
    from megatron.bytescale.core.datasets.document_dataset import DocumentConfig, build_document_datasets

    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / f"documents-{DATA_DOCUMENTS}"
    if not prefix.with_suffix(".bin").exists():
        write_data_set(prefix, DATA_DOCUMENTS)
    config = DocumentConfig(random_seed=1, sequence_length=CONTEXT, blend=([str(prefix)], None), split="98,1,1")
    source = build_document_datasets(config, [(steps + 3) * documents, documents, 0], lambda: True)[0]
    assert source is not None
    tokens = -(-1300 * documents // ranks)
    cluster = Cluster(ranks, -(-tokens // 8192) * 8192)
    planner = HdpPlanner(cluster, (StageCost(FORWARD, FORWARD.scaled(2.0)),))
    checked = CheckedPlanner(planner, check_step_plan, RANK, FACTS)
    plans = PlanMaker(PlannerInProcess(checked, slow_seconds=-1.0), None)
    settings = LoaderSettings(rank=RANK, samples_per_step=documents, plan_ahead=2)
    loader = StepLoader(source, plans, settings, source.sequences)
    loader.close()
    maker = loader._maker
    make, own = Timed(maker.step, profiled), Timed(partial(of_step_thread, rank=RANK), profiled)
    digests: list[str] = []

    def work() -> None:
        for step in range(steps + 2):
            began = time.thread_time()
            ids = maker.sample_ids(step * documents)
            assert ids is not None
            chosen = time.thread_time() - began
            batch = make(step, ids)
            make.seconds[-1] += chosen
            own(batch)
            digests.append(batch.plan.digest())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if profiled:
        for timed in (make, own):
            pstats.Stats(timed.profile, stream=sys.stderr).sort_stats("tottime").print_stats(24)
    return {
        "documents": documents,
        "ranks": ranks,
        "loader ms": [round(1000 * seconds, 1) for seconds in sorted(make.seconds[2:])],
        "step ms": [round(1000 * seconds, 1) for seconds in sorted(own.seconds[2:])],
        "digests": digests,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=500_000)
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measured(args.folder, args.documents, args.ranks, args.steps, args.profile)
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
