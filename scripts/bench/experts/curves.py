#!/usr/bin/env python3
"""Train experts that begin as copies of a dense model's MLPs: a gate against top-1, top-2 and the dense model.

    python scripts/bench/experts/curves.py --data data/python --plot curves.png

Each seed draws other weights and another order of documents, trains the dense model, and goes on from it once for each
arm, with a constant learning rate and the same documents. Steps of the gate compute more experts than others, so the
other arms train until they have computed as much: one training gives the loss on held-out documents at equal steps and
at equal FLOPs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.cost.model_shape import ModelShape
from megatron.bytescale.cli.shared.inputs import count

HIDDEN, FFN, LAYERS, HEADS, VOCABULARY, DOCUMENTS = 96, 256, 2, 4, 257, 8
COMMON = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} --seq-length 512 --max-position-embeddings 512 --split 96,4,0 --num-workers 0 "
    f"--hybrid-data-parallel --hdp-tokens-per-rank 4096 --global-batch-size {DOCUMENTS} --lr 2e-3 --min-lr 2e-3 "
    "--lr-decay-style constant --lr-warmup-iters 10 --clip-grad 1.0 --weight-decay 0.01 --log-interval 1 "
    "--eval-iters 16 --save-interval 1000000 --no-load-optim --no-load-rng --cpu"
).split()
EXPERTS = "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-use-upcycling --num-experts"
TOP1 = ("--moe-router-topk", "1", "--moe-router-pre-softmax")
TOP2 = ("--moe-router-topk", "2")
GATE = (*TOP2, *"--moe-router-dts --moe-dts-noise --moe-dts-temperature 2 0.1 --moe-dts-threshold 0.01".split())
GATED = "gate to top-2"
ARMS: dict[str, tuple[str, ...] | None] = {GATED: GATE, "top-2": TOP2, "top-1": TOP1, "dense": None}
VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: ([-+.0-9E]+)")


class Point(NamedTuple):
    """The loss on held-out documents after some steps, their tokens, and what they computed, in TFLOPs."""

    step: int
    tokens: float
    tflops: float
    loss: float


class Setting(NamedTuple):
    """What all trainings of one run of this script share."""

    data: str
    dense_steps: int
    steps: int
    experts: int
    interval: int


def train(flags: Sequence[str]) -> str:
    """Train in one process and return what it printed."""
    bytescale = str(Path(sys.executable).with_name("bytescale"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    done = subprocess.run([*launch, bytescale, "train", *COMMON, *flags], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"curves.py: error: a training failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def points(printed: str, metrics: str, experts_per_token: float | None) -> list[Point]:
    """Return the curve of a training: its log, its metrics.jsonl, and experts of a token where these do not tell.

    Args:
        printed: the log, with Megatron's lines of validations.
        metrics: one line of JSON a step.
        experts_per_token: of a router of fixed k; None for the dense model.
    """
    spent: dict[int, tuple[float, float]] = {}
    tokens = tflops = 0.0
    for row in map(json.loads, metrics.splitlines()):
        experts = row.get("active_experts") or experts_per_token
        step_tokens = row["tokens_per_second"] * row["step_seconds"]
        tokens += step_tokens * row["num_steps"]
        tflops += step_tflops(step_tokens, experts) * row["num_steps"]
        spent[row["iteration"]] = tokens, tflops
    found = {int(step): float(loss) for step, loss in VALIDATION.findall(printed)}
    return [Point(step, *spent[step], loss) for step, loss in sorted(found.items())]


def step_tflops(tokens: float, experts_per_token: float | None) -> float:
    """Return what a step of equally long documents computes, in TFLOPs; experts are as wide as the dense MLP."""
    width = round((experts_per_token or 1.0) * FFN)
    shape = ModelShape(LAYERS, HIDDEN, HEADS, HEADS, HIDDEN // HEADS, width, gated=True, vocab=VOCABULARY)
    return model_flops(shape, [round(tokens / DOCUMENTS)] * DOCUMENTS) / 1e12


def curves(setting: Setting, seeds: int, run: Callable[[Sequence[str]], str] = train) -> dict[str, list[list[Point]]]:
    """Return the curve of each seed by arm."""
    found: dict[str, list[list[Point]]] = {name: [] for name in ARMS}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shared = ["--data-path", setting.data, "--seed", str(1234 + seed)]
            dense = ["--train-iters", str(setting.dense_steps), "--eval-interval", str(setting.dense_steps)]
            run([*shared, *dense, "--save", str(folder / "dense")])
            steps = setting.steps
            for arm, flags in ARMS.items():
                logs = folder / arm.replace(" ", "-")
                if arm != GATED:
                    steps = steps_to(found[GATED][-1][-1], top_k(flags), setting.interval)
                given = [*shared, "--train-iters", str(steps), "--eval-interval", str(setting.interval)]
                given += ["--hdp-log-dir", str(logs), *start_of(arm, setting, folder)]
                found[arm].append(points(run(given), (logs / "metrics.jsonl").read_text(), top_k(flags)))
    return found


def steps_to(end: Point, experts_per_token: float | None, interval: int) -> int:
    """Return the steps, a multiple of ``interval``, in which an arm has computed as much as another at its end."""
    return math.ceil(end.tflops / step_tflops(end.tokens / end.step, experts_per_token) / interval) * interval


def start_of(arm: str, setting: Setting, folder: Path) -> list[str]:
    """Return the flags with which an arm goes on from the dense model."""
    flags, dense, saved = ARMS[arm], str(folder / "dense"), str(folder / "saved" / arm)
    if flags is None:
        return ["--pretrained-checkpoint", dense, "--load", saved]
    anneal = ["--moe-dts-steps", str(setting.steps // 2)] if "--moe-router-dts" in flags else []
    return [*EXPERTS.split(), str(setting.experts), *flags, *anneal, "--load", dense, "--save", saved]


def top_k(flags: Sequence[str] | None) -> float | None:
    """Return the experts of a token of an arm; None for the dense model."""
    return None if flags is None else float(flags[1])


def rows(found: Mapping[str, list[list[Point]]], last: int = 3) -> list[dict[str, object]]:
    """Return the loss of each arm after as many steps, and as many FLOPs, as the gate's training has.

    Each is a mean over ``last`` points and all seeds; the loss of each seed stands beside it.
    """
    result: list[dict[str, object]] = []
    for arm, of_arm in found.items():
        pairs = [(curve, gate[-1]) for curve, gate in zip(of_arm, found[GATED], strict=True)]
        at_steps = [_loss([point for point in curve if point.step <= end.step][-last:]) for curve, end in pairs]
        at_flops = [_loss(curve[-last:]) for curve, _ in pairs]
        result.append({
            "arm": arm,
            "steps": statistics.mean(curve[-1].step for curve in of_arm),
            "tflops": statistics.mean(curve[-1].tflops for curve in of_arm),
            "loss at equal steps": statistics.mean(at_steps),
            "of each seed": at_steps,
            "loss at equal FLOPs": statistics.mean(at_flops),
            "of each seed there": at_flops,
        })  # fmt: skip
    return result


def _loss(points_: Sequence[Point]) -> float:
    return statistics.mean(point.loss for point in points_)


def plot(found: Mapping[str, list[list[Point]]], path: Path) -> None:
    """Draw the mean loss of each arm against steps and against FLOPs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for arm, of_arm in found.items():
        shortest = min(map(len, of_arm))
        mean = np.mean([curve[:shortest] for curve in of_arm], axis=0)
        for panel, column in zip(panels, (0, 2), strict=True):
            panel.plot(mean[:, column], mean[:, -1], label=arm, marker=".")
    panels[0].set(xlabel="steps after the dense model", ylabel="loss of a byte on held-out documents")
    panels[1].set(xlabel="TFLOPs after the dense model")
    panels[1].legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Train all arms and print their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a data set of bytes (`bytescale corpus`)")
    parser.add_argument("--dense-steps", type=count, default=200, metavar="N", help="of the dense model (200)")
    parser.add_argument("--steps", type=count, default=200, metavar="N", help="of the gate (200)")
    parser.add_argument("--experts", type=count, default=16, metavar="N", help="of a layer (16)")
    parser.add_argument("--interval", type=count, default=20, metavar="N", help="steps from point to point (20)")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="trainings of each arm (3)")
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw the curves")
    args = parser.parse_args()
    setting = Setting(args.data, args.dense_steps, args.steps, args.experts, args.interval)
    found = curves(setting, args.seeds)
    for row in rows(found):
        print(json.dumps(row))
    for arm, of_arm in found.items():
        print(f"{arm}: " + ", ".join(f"{point.step} {point.loss:.3f}" for point in of_arm[0]))
    if args.plot:
        plot(found, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
