#!/usr/bin/env python3
"""Train a small model of bytes with and without n-gram memory, or with more and less staleness, and compare losses.

    python scripts/bench/states/ngram_loss.py --data data/python
    python scripts/bench/states/ngram_loss.py --data data/python --compare staleness

The model without a memory has a wider MLP, with at least as many parameters that multiply as the memory's keys and
values add. Staleness is that of tables in host memory, whose caches hold a tenth of the rows, on two ranks. Each seed
draws other weights and another order of documents; all arms of a seed see the same documents.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.bytescale.cli.shared.inputs import count

HIDDEN, LAYERS, FFN = 128, 2, 352
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --seq-length 1024 --max-position-embeddings 1024"
).split()
TRAIN = (
    "--hybrid-data-parallel --hdp-tokens-per-rank 4096 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 5 --clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 "
    "--eval-interval 1000 --split 100,0,0 --num-workers 0 --cpu"
).split()
ORDERS, HEADS, DIM = (3, 5), 4, 16
NGRAM = ["--ngram-layers", "1,2", "--ngram-orders", ",".join(map(str, ORDERS)), "--ngram-heads", str(HEADS),
         "--ngram-rows", str(1 << 18), "--ngram-dim", str(DIM)]  # fmt: skip
EQUAL_FFN = FFN + math.ceil(2 * HIDDEN * len(ORDERS) * HEADS * DIM / (3 * HIDDEN))
HOST = [*NGRAM, "--ffn-hidden-size", str(FFN), "--ngram-storage", "host"]
ARMS = {
    "memory": {
        "with memory": [*NGRAM, "--ffn-hidden-size", str(FFN)],
        "without": ["--ffn-hidden-size", str(EQUAL_FFN)],
    },
    "staleness": {
        f"staleness {bound}": [*HOST, "--ngram-staleness-read", str(bound), "--ngram-staleness-write", str(bound)]
        for bound in (0, 10)
    },
}
RANKS = {"memory": 1, "staleness": 2}
LAST = 10  # steps whose mean loss counts


def train(flags: Sequence[str], num_ranks: int, folder: Path) -> list[float]:
    """Train on some ranks and return the loss of each step."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={num_ranks}", "--no-python"]
    words = [
        *launch,
        str(Path(sys.executable).with_name("bytescale")),
        "train",
        *MODEL,
        *TRAIN,
        *flags,
        "--hdp-log-dir",
        str(folder),
    ]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["lm loss"]) for line in lines]


def measure(
    what: str, data: str, steps: int, seeds: int, run: Callable[[Sequence[str], int, Path], list[float]] = train
) -> dict[str, list[float]]:
    """Return the mean loss of the last steps of each seed, by arm of what is compared."""
    losses: dict[str, list[float]] = {}
    for name, flags in ARMS[what].items():
        for seed in range(seeds):
            given = [*flags, "--data-path", data, "--seed", str(1234 + seed)]
            given += ["--train-iters", str(steps), "--lr-decay-iters", str(steps)]
            with tempfile.TemporaryDirectory() as folder:
                losses.setdefault(name, []).append(statistics.mean(run(given, RANKS[what], Path(folder))[-LAST:]))
    return losses


def main() -> int:
    """Measure and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a data set of bytes (`bytescale corpus`)")
    parser.add_argument("--compare", choices=ARMS, default="memory", help="memory (default) or staleness")
    parser.add_argument("--steps", type=count, default=120, metavar="N", help="of a training (120)")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="trainings of each arm (3)")
    args = parser.parse_args()
    for name, losses in measure(args.compare, args.data, args.steps, args.seeds).items():
        print(f"{name}: mean {statistics.mean(losses):.4f} of {', '.join(f'{loss:.4f}' for loss in losses)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
