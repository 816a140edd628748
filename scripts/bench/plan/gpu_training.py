"""Measure the training command on one GPU: tokens and FLOPs per second.

    .venv/bin/python scripts/bench/plan/gpu_training.py [--fp8 tensorwise] [--json]

8 layers of 7B width with optimizer in bfloat16, on the demo's documents (real text, a token for each byte) of up to
16,384 tokens, packed by the plan. Figures are medians of all steps except the first two. ``--device cpu --quick`` tests
the script with the demo's model.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from scripts.bench.gpu import gpu_parser, parse_on_gpu
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, printed_by
from scripts.demo import Demo, build_corpora, read_metrics

MODEL = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 16384 --max-position-embeddings 16384 --hdp-tokens-per-rank 16384 "
    "--global-batch-size 16"
).split()
TINY = "--seq-length 1024 --max-position-embeddings 1024 --hdp-tokens-per-rank 1024 --global-batch-size 4".split()
WARM_UP = 2
TFLOPS = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")
FP8 = "--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe".split()


def training_command(demo: Demo, is_tiny: bool, num_steps: int, folder: Path, recipe: str | None = None) -> list[str]:
    """Return the training command; ``recipe`` is the recipe of FP8. The last value of a repeated flag counts."""
    precision = [] if recipe is None else [*FP8, recipe]
    settings = ["--train-iters", str(num_steps), "--hdp-log-dir", str(folder), "--tensorboard-dir", str(folder)]
    return [*demo.command, *(TINY if is_tiny else MODEL), *settings, *precision]


def figures_of(printed: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of all steps after the warm-up, from the log and from ``metrics.jsonl``.

    Raises:
        RuntimeError: there are no steps after the warm-up.
    """
    timed = steps[WARM_UP:]
    if not timed:
        raise RuntimeError(f"{len(steps)} steps ran, and the first {WARM_UP} warm up: give more --steps")
    tera_flops = [float(rate) for rate in TFLOPS.findall(printed)][WARM_UP:]
    return {
        "num_steps": len(timed),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in timed),
        "tflops_per_gpu": statistics.median(tera_flops) if tera_flops else None,
        "padding_share": statistics.median(step["padding_share"] for step in timed),
        "losses": [step["lm loss"] for step in steps],
    }


def main() -> None:
    """Train, print, and with ``--json`` end with one JSON object."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--fp8", metavar="RECIPE", help="train in FP8: tensorwise, blockwise or mxfp8")
    parser.add_argument("--steps", type=int, default=10, help=f"steps; the first {WARM_UP} warm up (%(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "demo", help="of the corpora (runs/demo)")
    args = parse_on_gpu(parser)
    demo = Demo(1, on_cpu=args.device == "cpu", folder=args.folder.resolve())
    build_corpora(demo, partial(print, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        command = training_command(demo, args.quick, args.steps, Path(folder), args.fp8)
        (printed,) = (printed_by(command) for _ in progress([f"training, {args.steps} steps"]))
        figures = figures_of(printed, read_metrics(Path(folder) / "metrics.jsonl"))
    rate = "" if figures["tflops_per_gpu"] is None else f", {figures['tflops_per_gpu']:.1f} TFLOP/s"
    print(f"{figures['tokens_per_second']:,.0f} tokens/s{rate} (median of {figures['num_steps']} steps)")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
