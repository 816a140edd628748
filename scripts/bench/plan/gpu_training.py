"""Measure training on one GPU: tokens and floating-point operations a second, by the command that trains.

    .venv/bin/python scripts/bench/plan/gpu_training.py [--fp8 tensorwise] [--json]

8 layers of 7B width with optimizer in bfloat16, on the demo's documents (real text, a token for each byte) of up to
16,384 tokens, packed by the plan. Medians of the steps after the first two. ``--device cpu --quick`` trains the demo's
model, as a test of the script.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from rich.console import Console  # noqa: E402

from scripts.bench.plan.launch import printed_by  # noqa: E402
from scripts.demo import Demo, build_corpora, num_gpus, read_metrics  # noqa: E402

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
    """Return the command; of a flag that is given twice, the last value counts. ``recipe``: of FP8."""
    precision = [] if recipe is None else [*FP8, recipe]
    settings = ["--train-iters", str(num_steps), "--hdp-log-dir", str(folder), "--tensorboard-dir", str(folder)]
    return [*demo.command, *(TINY if is_tiny else MODEL), *settings, *precision]


def figures_of(printed: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the steps after those that warm up, from the log and from ``metrics.jsonl``."""
    timed = steps[WARM_UP:]
    if not timed:
        raise RuntimeError(f"{len(steps)} steps were run; {WARM_UP} of them warm up, so give more --steps")
    tera_flops = [float(found) for found in TFLOPS.findall(printed)][WARM_UP:]
    return {
        "num_steps": len(timed),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in timed),
        "tflops_per_gpu": statistics.median(tera_flops) if tera_flops else None,
        "padding_share": statistics.median(step["padding_share"] for step in timed),
        "losses": [step["lm loss"] for step in steps],
    }


def main() -> None:
    """Train, print, and with --json end with one JSON object."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="the demo's model")
    parser.add_argument("--fp8", metavar="RECIPE", help="train in FP8: tensorwise, blockwise or mxfp8")
    parser.add_argument("--steps", type=int, default=10, help=f"of which {WARM_UP} warm up (%(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "demo", help="of the corpora (runs/demo)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    if args.device == "cuda" and not num_gpus():
        parser.error("there is no GPU; --device cpu --quick trains the demo's model")
    demo = Demo(1, on_cpu=args.device == "cpu", folder=args.folder.resolve())
    build_corpora(demo, Console(stderr=True))
    with tempfile.TemporaryDirectory() as folder:
        printed = printed_by(training_command(demo, args.quick, args.steps, Path(folder), args.fp8))
        figures = figures_of(printed, read_metrics(Path(folder) / "metrics.jsonl"))
    rate = "" if figures["tflops_per_gpu"] is None else f", {figures['tflops_per_gpu']:.1f} TFLOP/s"
    print(f"{figures['tokens_per_second']:,.0f} tokens/s{rate} (median of {figures['num_steps']} steps)")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
