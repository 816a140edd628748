"""Measure Seq1F1B: speed of a pipeline in slices, activations of its first stage, overhead of slices.

    .venv/bin/python scripts/bench/pipeline/seq1f1b.py --parts a    # about 10 minutes on 2 cores
    .venv/bin/python scripts/bench/pipeline/seq1f1b.py [--json]     # all parts: more than an hour on 2 cores

(a) Speed over 1F1B on 2 stages with 2 micro-batches of one long sequence: even slices, slices of equal time (calibrated
    on this machine), and slices of equal time with stages two forwards ahead. The arms run in turn.
(b) Peak of the bytes that stage 0 of 4 saves for backward, with 1, 2, 4 and 8 even slices, against (p + k - 1) / k.
(c) Time of forward and backward of one layer in slices, over the time of the whole sequence, in this process.
(d) Speed of slices of equal time as in (a), for several numbers of micro-batches, with the bound. *replayed* takes the
    least processor time of each pass in the first training, in the order of the schedule and with free messages, which
    other work on the machine hardly changes.
(e) Speed of zero bubble over 1F1B and over slices of equal time, as in (a).

All parts except (c) train with Megatron in real processes. 1F1B runs as one slice, with the same code and kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts
from bytescale_ext.attention.slices import MicroBatchPrefix, slice_attention
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.actions import Action, bubble_of_equal_costs, seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import simulate_slices
from bytescale_ext.plan.schedule.slices import slice_lengths, slice_ranges
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from megatron.bytescale import features
from megatron.bytescale.features.slices.flags import flags_of
from scripts.bench.gpu import median_seconds
from scripts.bench.pipeline.saved_bytes import SavedBytes
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, in_turns, printed_by

NUM_SLICES = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer of the measured model."""

    hidden: int = 256
    num_heads: int = 4
    ffn_hidden: int = 1024


class Layer(torch.nn.Module):
    """A transformer layer with attention over slices, independent of Megatron."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        make = {"device": device, "dtype": dtype, "bias": False}
        self.heads = sizes.num_heads
        self.qkv = torch.nn.Linear(sizes.hidden, 3 * sizes.hidden, **make)
        self.proj = torch.nn.Linear(sizes.hidden, sizes.hidden, **make)
        self.up = torch.nn.Linear(sizes.hidden, sizes.ffn_hidden, **make)
        self.down = torch.nn.Linear(sizes.ffn_hidden, sizes.hidden, **make)
        self.kernel = choose_kernel(device, dtype, sizes.hidden // sizes.num_heads).kernel

    def forward(self, rows: torch.Tensor, prefix: MicroBatchPrefix, layout: SliceLayout) -> torch.Tensor:
        """Return the output [n, hidden] of rows [n, hidden] of one slice."""
        query, key, value = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).unbind(1)
        layer = prefix.layer(self)
        backend = Backend(None, self.kernel, query.shape[-1] ** -0.5)
        out = slice_attention(query, key, value, layer, layout, backend)
        rows = rows + self.proj(out.flatten(1))
        return rows + self.down(torch.nn.functional.gelu(self.up(rows)))


def layer_seconds(layer: Layer, sizes: Sizes, lengths: tuple[int, ...], repeats: int = 3) -> float:
    """Return the median seconds of forward and backward of a sequence in slices."""
    weight = layer.qkv.weight
    rows = torch.randn(sum(lengths), sizes.hidden, device=weight.device, dtype=weight.dtype)

    def run() -> None:
        prefix, outs = MicroBatchPrefix(), []
        for part, layout in zip(slice_ranges(lengths), sample_layouts(lengths, 1), strict=True):
            outs.append(layer(rows[part.start : part.stop].requires_grad_(), prefix, layout))
        for out in reversed(outs):
            out.backward(out.detach())

    return median_seconds(run, repeats, weight.is_cuda)


def measured_cost(layer: Layer, sizes: Sizes, num_tokens: int) -> CostModel:
    """Return the seconds of a layer as ``a s^2 + b s``, fitted to a whole and to half a sequence."""
    whole, half = (layer_seconds(layer, sizes, (tokens,)) for tokens in (num_tokens, num_tokens // 2))
    a = max(0.0, 2 * (whole - 2 * half) / num_tokens**2)
    return CostModel(a=a, b=max(1e-12, whole / num_tokens - a * num_tokens))


@dataclass(frozen=True)
class Slices:
    """Slices of the samples of a measured run."""

    slicing: Slicing
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a measured run."""

    num_stages: int
    num_micro_batches: int
    layers_per_stage: int


def train(pipeline: Pipeline, slices: Slices, steps: int, sizes: Sizes) -> str:
    """Train in slices, with one process for each stage, and return the output of the processes."""
    num_stages, num_tokens = pipeline.num_stages, sum(slices.lengths)
    flags = {
        "num-layers": pipeline.layers_per_stage * num_stages,
        "hidden-size": sizes.hidden, "ffn-hidden-size": sizes.ffn_hidden,
        "num-attention-heads": sizes.num_heads, "seq-length": num_tokens, "max-position-embeddings": num_tokens,
        "position-embedding-type": "rope", "attention-dropout": 0, "hidden-dropout": 0, "micro-batch-size": 1,
        "tokenizer-type": "NullTokenizer", "vocab-size": 127, "pipeline-model-parallel-size": num_stages,
        "global-batch-size": pipeline.num_micro_batches, "train-iters": steps, "lr": 1e-4,
        "log-interval": 1, "eval-iters": 0, "eval-interval": 1000,
        "num-workers": 0, "split": "100,0,0",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += ["--mock-data", "--cpu", "--no-one-logger", *flags_of(slices.slicing)]
    words.append(f"--seq1f1b-partition={','.join(map(str, slices.lengths))}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_stages}"]
    return printed_by([*launch, __file__, "--rank", *words])


@contextlib.contextmanager
def one_slice_counts() -> Iterator[None]:
    """Switch slices on for any number of them: ``--seq1f1b-slices 1`` alone leaves samples to Megatron."""
    table = [replace(one, is_on=lambda args: True) if one.name == "slices" else one for one in features.FEATURES]
    with patch.object(features, "FEATURES", tuple(table)):
        yield


def rank_main(argv: list[str]) -> None:
    """Run pretrain_gpt_hdp.py as one process of ``train``; print its saved bytes and the seconds of its passes."""
    sys.argv = ["pretrain_gpt_hdp.py", *argv]
    saved = SavedBytes()
    with saved, one_slice_counts(), timed_passes() as seconds:
        runpy.run_path(str(ROOT / "pretrain_gpt_hdp.py"), run_name="__main__")
    if os.environ["RANK"] == "0":
        print(f"\nSAVED {saved.peak_bytes}", flush=True)
    passes = [[*action, min(values[1:] or values)] for action, values in seconds.items()]
    print(f"\nPASSES {json.dumps([int(os.environ['RANK']), passes])}", flush=True)


@contextlib.contextmanager
def timed_passes() -> Iterator[dict[Action, list[float]]]:
    """Yield the processor seconds of every pass in every step, which other work on the machine hardly changes."""
    from megatron.bytescale.core.pipeline_parallel.seq1f1b import SliceStep

    seconds: dict[Action, list[float]] = {}

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(step: SliceStep, *args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            result = run(step, *args, **kwargs)
            assert step.action is not None
            seconds.setdefault(step.action, []).append(time.thread_time() - began)
            return result

        return run_timed

    passes = {name: timed(getattr(SliceStep, name)) for name in ("forward_step", "backward_step")}
    with patch.multiple(SliceStep, **passes):
        yield seconds


def replayed_seconds(pipeline: Pipeline, slicing: Slicing, text: str) -> float:
    """Return the seconds of a step, simulated from the passes that a training printed, with a core for each stage.

    All micro-batches are equal, so each pass takes the least processor time of its kind: other work only adds to it.
    """
    least: dict[tuple[int, str, int], float] = {}
    for stage, rows in map(json.loads, re.findall(r"^PASSES (.*)$", text, re.MULTILINE)):
        for kind, _, index, _, seconds in rows:
            least[stage, kind, index] = min(seconds, least.get((stage, kind, index), seconds))
    schedule = seq1f1b_schedule(pipeline.num_stages, pipeline.num_micro_batches, slicing)
    return simulate_slices(schedule, lambda stage, action: least[stage, action.kind, action.slice_index]).makespan


def arms_of(num_tokens: int, num_slices: int, cost: CostModel) -> dict[str, Slices]:
    """Return the arms of part (a): 1F1B, even slices, slices of equal time, and these two forwards ahead."""
    plain, equal_time = Slicing(num_slices), slice_lengths(num_tokens, num_slices, "time", cost)
    ahead = plain.in_eager_order()
    return {
        "1f1b": Slices(ONE_SLICE, (num_tokens,)),
        "even": Slices(plain, slice_lengths(num_tokens, num_slices, "even")),
        "time": Slices(plain, equal_time),
        ahead.order: Slices(ahead, equal_time),
    }


def measured_arms(sizes: Sizes, num_tokens: int, num_slices: int) -> dict[str, Slices]:
    """Return ``arms_of`` with slices of equal time, measured on this machine."""
    torch.set_num_threads(1)
    return arms_of(num_tokens, num_slices, measured_cost(Layer(sizes, "cpu", torch.float32), sizes, num_tokens))


def measured_seconds(text: str) -> list[float]:
    """Return the seconds of every step except the first, from the output of a training."""
    return [float(value) / 1000 for value in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)[1:]]


def speed(arms: dict[str, Slices], steps: int, rounds: int) -> dict[str, Any]:
    """Measure part (a): seconds of a step of each arm, and its speed over 1F1B."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _, name in progress(in_turns(list(arms), rounds), lambda turn: f"{turn[1]}, round {turn[0] + 1}"):
        seconds[name] += measured_seconds(train(Pipeline(2, 2, 2), arms[name], steps, Sizes()))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "slices": {name: list(slices.lengths) for name, slices in arms.items()},
        "step_seconds": median,
        **{f"speedup_{name}": median["1f1b"] / median[name] for name in arms if name != "1f1b"},
    }


def bound(num_stages: int, num_micro_batches: int, num_slices: int) -> float:
    """Return the upper bound of the gain over 1F1B: slices cost the same, messages and slicing cost nothing.

    1F1B takes m + p - 1 slots of a micro-batch, slices take m k + p - 1 slots of a k-th of it (Seq1F1B, section 3.4).
    """
    shares = [1 - bubble_of_equal_costs(num_stages, num_micro_batches, k) for k in (1, num_slices)]
    return shares[1] / shares[0]


def by_micro_batches(
    arms: dict[str, Slices], counts: tuple[int, ...], trained: tuple[int, ...], steps: int, rounds: int
) -> dict[int, dict[str, Any]]:
    """Measure part (d): the bound and the gain of each round, for each number of micro-batches."""
    rows: dict[int, dict[str, Any]] = {}
    for count in counts:
        rows[count] = {"bound": round(bound(2, count, NUM_SLICES), 3), "replayed": [], "measured": []}
    turns = [(number, count) for number in range(rounds) for count in trained]
    for _, count in progress(turns, lambda turn: f"{turn[1]} micro-batches, round {turn[0] + 1}"):
        texts = {name: train(Pipeline(2, count, 2), arms[name], steps, Sizes()) for name in ("1f1b", "time")}
        medians = [statistics.median(measured_seconds(text)) for text in texts.values()]
        rows[count]["measured"].append(round(medians[0] / medians[1], 3))
        for other in counts if count == trained[0] else ():  # the passes do not depend on the count
            pipeline = Pipeline(2, other, 2)
            both = [replayed_seconds(pipeline, arms[name].slicing, text) for name, text in texts.items()]
            rows[other]["replayed"].append(round(both[0] / both[1], 3))
    return rows


def zero_bubble(arms: dict[str, Slices], steps: int, rounds: int) -> dict[str, float]:
    """Measure part (e): speed of zero bubble over 1F1B and over slices of equal time."""
    arms = {name: arms[name] for name in ("1f1b", "time")}
    split = {f"{name} split": Slices(replace(arm.slicing, zero_bubble=True), arm.lengths) for name, arm in arms.items()}
    seconds = speed(arms | split, steps, rounds)["step_seconds"]
    return {name: seconds[name] / seconds[f"{name} split"] for name in arms}


def activations(sizes: Sizes, num_tokens: int) -> dict[str, Any]:
    """Measure part (b): peak of the bytes that stage 0 of 4 saves for backward, and the same by the formula."""
    saved = {}
    for num_slices in progress((1, 2, 4, 8), lambda k: f"saved bytes, {k} slices"):
        slices = Slices(Slicing(num_slices), slice_lengths(num_tokens, num_slices, "even"))
        text = train(Pipeline(4, 6, 1), slices, 1, sizes)
        line = re.search(r"SAVED (\d+)", text)
        assert line, text[-2000:]
        saved[num_slices] = int(line[1])
    expected = {k: saved[1] / 4 * seq1f1b_schedule(4, 6, Slicing(k)).peak_slices(0) / k for k in saved}
    return {
        "activation_bytes": saved,
        "activation_bytes_by_formula": expected,
        "activation_error": max(abs(saved[k] / expected[k] - 1.0) for k in saved),
    }


def overheads(sizes: Sizes, lengths: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, float]:
    """Measure part (c): overhead of 4 and 8 slices, as a share of the time of the whole sequence."""
    layer = Layer(sizes, device, dtype)
    figures = {}
    for num_tokens in progress(lengths, lambda length: f"layer on {length} tokens"):
        cost = measured_cost(layer, sizes, num_tokens)
        whole = layer_seconds(layer, sizes, (num_tokens,))
        for num_slices in (4, 8):
            slices = slice_lengths(num_tokens, num_slices, "time", cost)
            figures[f"{num_tokens}/{num_slices}"] = layer_seconds(layer, sizes, slices) / whole - 1.0
    return figures


def main() -> int:
    """Measure and print; with ``--json`` the last line is a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="abcde", help="parts to measure (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sequence in (a), (d), (e) (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each run; the first does not count (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each arm of (a), (d), (e) (%(default)s)")
    parser.add_argument("--micro-batches", default="2,4,8,16", help="numbers of micro-batches in (d) (%(default)s)")
    parser.add_argument("--trained", default="2,4,8,16", help="numbers of them that are trained (%(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    sizes, figures = Sizes(), {}
    arms = measured_arms(sizes, args.tokens, NUM_SLICES) if set("ade") & set(args.parts) else {}
    if "a" in args.parts:
        figures |= speed(arms, args.steps, args.rounds)
    if "b" in args.parts:
        figures |= activations(Sizes(64, 2, 256), 2048)
    if "c" in args.parts:
        figures["split_overhead"] = overheads(sizes, (16384,), "cpu", torch.float32)
    if "d" in args.parts:
        counts, trained = (tuple(map(int, text.split(","))) for text in (args.micro_batches, args.trained))
        figures["micro_batches"] = by_micro_batches(arms, counts, trained, args.steps, args.rounds)
    if "e" in args.parts:
        figures["zero_bubble"] = zero_bubble(arms, args.steps, args.rounds)
    for name, value in figures.items():
        print(f"{name:28} {value}")
    if args.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
    else:
        sys.exit(main())
