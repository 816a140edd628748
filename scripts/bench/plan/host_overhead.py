"""Measure the time of this project's Python code in a training step, in the training thread and in the loader's thread.

    python scripts/bench/plan/host_overhead.py
    python scripts/bench/plan/host_overhead.py --documents 15000 --ranks 8 --output overhead.json

One process runs the part of one rank of a large job: its steps come from the real loader, the real planner and the
real forward step. Megatron's schedule and model are stand-ins that do nothing, and their time is left out. The rank is
the one with the most documents. Needs no GPU, one core and a few minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import PlanMaker
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch
from bytescale_ext.parallel.p2p import ExchangeStats
from bytescale_ext.plan.cost.model_cost import flops_stage_cost
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale import cpu

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.profile import Subject

K = 1 << 10
TOKENS_PER_RANK = 8 * K
LONGEST = 256 * K
VOCAB = 1000
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --attention-dropout 0 "
    f"--hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1}"
).split()


@dataclass(frozen=True)
class Overhead:
    """Seconds of one case; medians over steps.

    Attributes:
        documents: of a step, on all ranks.
        ranks: HDP ranks.
        micro_batches: of the rank.
        rank_documents: in these micro-batches.
        step: in the training thread, once a step.
        micro_batch: in the training thread, the mean of a micro-batch.
        plan: in the background, lengths, plan and check.
        read: in the background, attention layouts and tokens.
    """

    documents: int
    ranks: int
    micro_batches: int
    rank_documents: int
    step: float
    micro_batch: float
    plan: float
    read: float


class Words:
    """A ``TokenSource`` of documents that all begin with the same words."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._words = np.arange(max(lengths) + 1) % VOCAB

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, sample_id: int) -> int:
        """Return the tokens of a document."""
        return self._lengths[sample_id]

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [stop - start] of a document, one fewer past its end."""
        return self._words[start : min(stop, self._lengths[sample_id])]

    def describe(self, sample_id: int) -> str:
        """For messages."""
        return f"document {sample_id}"


class EmptyModel(torch.nn.Module):
    """A model whose losses are zero, and which counts the seconds of its calls.

    Attributes:
        seconds: of all calls so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(param_sync_func=None, sequence_parallel=False, num_moe_experts=None)
        self.vp_stage, self.pre_process, self.post_process = None, True, True
        self.seconds = 0.0

    def forward(self, tokens: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        """Return losses [1, rows] of tokens [1, rows]."""
        began = time.perf_counter()
        losses = torch.zeros(tokens.shape)
        self.seconds += time.perf_counter() - began
        return losses


def documents_of(count: int, longest: int, seed: int) -> list[int]:
    """Return lengths [count] of Byted's distribution."""
    drawn: list[int] = []
    while len(drawn) < count:
        drawn += sample_lengths("byted", longest, max(count * K, longest), seed).tolist()
        seed += 1000
    return [int(length) for length in drawn[:count]]


class ForwardPasses:
    """Runs every micro-batch forward, in place of Megatron's schedule.

    Attributes:
        seconds: of all passes so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(
        self, forward_step_func: Callable[..., Any], data_iterator: Any, num_microbatches: int, model: Any
    ) -> None:
        """Run as one of Megatron's schedules."""
        began = time.perf_counter()
        for _ in range(num_microbatches):
            output, loss_of = forward_step_func(data_iterator[0], model[0])
            loss_of(output)
        self.seconds += time.perf_counter() - began


def measure(subject: Subject, num_documents: int, num_ranks: int, num_steps: int) -> Overhead:
    """Return the overhead of one case, after a first step that compares plans."""
    runtime = subject.runtime
    longest = min(LONGEST, num_ranks * TOKENS_PER_RANK)
    lengths = [length for step in range(num_steps + 1) for length in documents_of(num_documents, longest, step)]
    stage_cost = flops_stage_cost(subject.shape, subject.shape.num_layers)
    planner = HdpPlanner(Cluster(num_ranks, TOKENS_PER_RANK), (stage_cost,), balance="dp")
    plan = planner(lengths[:num_documents])
    busiest = max(range(num_ranks), key=lambda rank: sum(len(one.shards) for one in plan.ranks[rank]))
    runtime.comm = SimpleNamespace(rank=busiest, stats=ExchangeStats())
    runtime.plans_compared = False
    settings = LoaderSettings(busiest, num_documents, plan_ahead=1, vocab_size=VOCAB)
    loader = StepLoader(Words(lengths), PlanMaker(planner, check_step_plan), settings)
    steps = [
        (*timed_step(runtime, EmptyModel(), batch), batch) for batch in list(loader)
    ]  # the loader's thread has ended
    timed = steps[1:]
    assert len(timed) == num_steps, f"{len(timed)=} {num_steps=}"
    return Overhead(
        num_documents,
        num_ranks,
        micro_batches=len(timed[0][2].micro_batches),
        rank_documents=sum(len(one.documents) for one in timed[0][2].micro_batches),
        step=statistics.median(one[0] for one in timed),
        micro_batch=statistics.median(one[1] for one in timed),
        plan=statistics.median(one[2].plan_seconds for one in timed),
        read=statistics.median(one[2].read_seconds for one in timed),
    )


def timed_step(runtime: Runtime, model: EmptyModel, batch: StepBatch) -> tuple[float, float]:
    """Return the seconds that are spent once a step, and those of the mean micro-batch."""
    from megatron.bytescale.core.pipeline_parallel.schedules import run_step
    from megatron.bytescale.features.hdp.build import forward_step

    passes, began = ForwardPasses(), time.perf_counter()
    run_step(
        runtime, passes, data_iterator=iter([batch]), model=[model], num_microbatches=None,
        forward_step_func=forward_step(runtime),
    )  # fmt: skip
    whole = time.perf_counter() - began
    return whole - passes.seconds, (passes.seconds - model.seconds) / len(batch.micro_batches)


def table(rows: Sequence[Overhead]) -> str:
    """Return the cases as text, in milliseconds."""
    names = ("documents", "ranks", "of the rank", "micro-batches", "a step", "a micro-batch", "plan", "read")
    lines = [" ".join(f"{name:>13}" for name in names)]
    for row in rows:
        counts = (row.documents, row.ranks, row.rank_documents, row.micro_batches)
        times = (row.step, row.micro_batch, row.plan, row.read)
        lines.append(" ".join([f"{count:13,}" for count in counts] + [f"{1e3 * one:13,.3f}" for one in times]))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1 * K, 4 * K, 15_000, 64 * K], metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512], metavar="N")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps of each case (3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the seconds as JSON")
    args = parser.parse_args()
    rows = measured(args.documents, args.ranks, args.steps)
    print("milliseconds; a step, a micro-batch: in the training thread; plan, read: of a step, in the loader's thread")
    print(table(rows))
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def measured(documents: Sequence[int], ranks: Sequence[int], num_steps: int) -> list[Overhead]:
    """Return the overhead of each case. Once in a process."""
    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.training.profile import prepare

    with contextlib.redirect_stdout(io.StringIO()):
        subject = prepare(MODEL, TOKENS_PER_RANK, on_cpu=True)
    subject.args.check_for_nan_in_loss_and_grad = True  # as training does
    rows = [measure(subject, count, size, num_steps) for count in documents for size in ranks if size <= count]
    torch.distributed.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
