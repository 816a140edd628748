"""Measure whole training steps with resident states and with states in pages, on one CPU process, arms in turns.

    OMP_NUM_THREADS=1 python scripts/bench/states/whole_step.py [--tokens 4096] [--steps 4] [--rounds 2]

Every arm trains Megatron's model on the same documents, each as long as a micro-batch. Times are of the processor, so
that other processes of the machine do not count; the optimizer's share is that of ``optimizer.step``, with norms and
clipping. The arm ``offload`` is Megatron's own ``--optimizer-cpu-offload``; where it fails, its last line is printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from megatron.bytescale.train import main as train  # noqa: E402

VOCAB = 1000
MARK = "STEP "
ARMS: dict[str, list[str]] = {
    "resident": [],
    "stage 1": ["--state-policy", "paged"],
    "stage 2": ["--state-policy", "paged", "--state-stage", "2"],
    "stage 3": ["--state-policy", "paged", "--state-stage", "3"],
    "offload": ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"],
}


def training_flags(args: argparse.Namespace, corpus: Path) -> list[str]:
    """Return what all arms have in common."""
    words = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads 4 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --attention-dropout 0 "
        "--untie-embeddings-and-output-weights --hidden-dropout 0 --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCAB} --seq-length {args.tokens} --max-position-embeddings {args.tokens} "
        f"--hybrid-data-parallel --hdp-tokens-per-rank {args.tokens} --global-batch-size 1 --train-iters {args.steps} "
        "--lr 1e-3 --lr-decay-iters 10 --eval-interval 1000 --save-interval 1000 --clip-grad 1.0 --weight-decay 0.1 "
        "--eval-iters 0 --split 100,0,0 --no-one-logger "
        f"--num-workers 0 --use-distributed-optimizer --log-interval 1 --cpu --data-path {corpus}"
    )
    return words.split()


def write_corpus(folder: Path, tokens: int, count: int) -> Path:
    """Write documents of random tokens and return their prefix."""
    from megatron.bytescale.core.datasets.corpus import write_tokens  # not where a worker begins

    dice = np.random.default_rng(0)
    write_tokens(folder / "docs", (dice.integers(0, VOCAB, tokens) for _ in range(count)))
    return folder / "docs"


def timed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``train_step``: print the processor's seconds of the step, and of its optimizer."""

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        of_optimizer, step = [0.0], optimizer.step

        def timed_update() -> Any:
            begun = time.process_time()
            result = step()
            of_optimizer[0] += time.process_time() - begun
            return result

        with mock.patch.object(optimizer, "step", timed_update):
            begun = time.process_time()
            result = original(forward, data, model, optimizer, *args, **kwargs)
            print(f"{MARK}{time.process_time() - begun} {of_optimizer[0]}", flush=True)
        return result

    return train_step


def train_and_time() -> None:
    """Train by the flags of this process and print the times of each step."""

    def adapt(training: Any, runtime: Any) -> Any:
        of_megatron = importlib.import_module("megatron.training.training")
        mock.patch.object(of_megatron, "train_step", timed(of_megatron.train_step)).start()
        return training

    train(adapt)


def run_arm(flags: Sequence[str], timeout: float) -> tuple[list[tuple[float, float]], str]:
    """Train in a process of its own. Returns (step, optimizer) seconds without the first step, and the last line."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "-W", "ignore", __file__, "--worker", *flags]
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    lines = [line.removeprefix(MARK).split() for line in done.stdout.splitlines() if line.startswith(MARK)]
    steps = [(float(step), float(update)) for step, update in lines[1:]]
    return steps, "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [""])[-1]


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the medians of each arm, and their ratio to the resident one's."""
    steps: dict[str, list[tuple[float, float]]] = {arm: [] for arm in args.arms}
    failures = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder), args.tokens, 2 * args.steps)
        for _ in range(args.rounds):
            for arm in [one for one in args.arms if one not in failures]:
                found, failure = run_arm([*training_flags(args, corpus), *ARMS[arm]], args.timeout)
                steps[arm] += found
                if failure:
                    failures[arm] = failure
    figures: dict[str, dict[str, Any]] = {arm: {"failure": failure} for arm, failure in failures.items()}
    for arm, found in steps.items():
        if arm not in failures:
            seconds, update = (statistics.median(column) for column in zip(*found, strict=True))
            figures[arm] = {"seconds": seconds, "update_seconds": update, "steps": len(found)}
    for arm in figures.values():
        if "seconds" in arm and "seconds" in figures.get("resident", {}):
            arm["over_resident"] = arm["seconds"] / figures["resident"]["seconds"]
    return figures


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a document and micro-batch (4096)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first one is not counted (4)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each arm, in turns (2)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--timeout", type=float, default=550, help="seconds of a run (550)")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = options(words)
    figures = measure(args)
    for arm, row in figures.items():
        if "failure" in row:
            print(f"{arm:10} does not run here: {row['failure']}")
            continue
        ratio = f", {row['over_resident']:.3f} of resident" if "over_resident" in row else ""
        print(
            f"{arm:10} {row['seconds']:8.3f} s a step, optimizer {row['update_seconds']:.3f} s "
            f"({row['update_seconds'] / row['seconds']:.1%}){ratio}; {row['steps']} steps"
        )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.argv = ["pretrain_gpt_hdp.py", *sys.argv[2:]]
        train_and_time()
    else:
        main()
