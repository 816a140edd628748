"""The bench of training on a GPU: its command, its figures, and a tiny run on CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.bytescale.arguments.parse import add_arguments
from scripts.bench.plan import gpu_training
from scripts.demo import CORPORA, Demo
from tests.e2e.corpora import write_documents

ROOT = Path(__file__).resolve().parents[3]
PRINTED = "\n".join(
    f" iteration {step}/ 4 | elapsed time per iteration (ms): 9.0 | throughput per GPU (TFLOP/s/GPU): {rate} |"
    for step, rate in enumerate((1.0, 50.0, 300.0, 310.0, 290.5))
)


def steps(count: int) -> list[dict[str, float]]:
    return [
        {"tokens_per_second": 10.0 * step, "padding_share": 0.0, "lm loss": 5.0 - step} for step in range(1, count + 1)
    ]


def test_figures_leave_out_the_warm_up() -> None:
    figures = gpu_training.figures_of(PRINTED, steps(5))
    assert figures == {
        "num_steps": 3,
        "tokens_per_second": 40.0,
        "tflops_per_gpu": 300.0,
        "padding_share": 0.0,
        "losses": [4.0, 3.0, 2.0, 1.0, 0.0],
    }
    assert gpu_training.figures_of("nothing", steps(3))["tflops_per_gpu"] is None
    with pytest.raises(RuntimeError, match=r"2 steps ran.* give more --steps"):
        gpu_training.figures_of(PRINTED, steps(2))


def test_the_model_replaces_the_model_of_the_demo(tmp_path: Path) -> None:
    """On one GPU the longest document fits in a micro-batch, and our parser accepts the flags."""
    words = gpu_training.training_command(Demo(1, False, tmp_path), False, 10, tmp_path)
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--train-iters", type=int)
    args, _ = parser.parse_known_args(words[words.index(str(ROOT / "pretrain_gpt_hdp.py")) + 1 :])
    assert args.hybrid_data_parallel
    assert not args.cpu
    assert (args.seq_length, args.hdp_tokens_per_rank, args.num_layers, args.train_iters) == (16384, 16384, 8, 10)
    assert "--bf16" in words
    in_fp8 = gpu_training.training_command(Demo(1, False, tmp_path), False, 10, tmp_path, "tensorwise")
    assert set(in_fp8) - set(words) == {*gpu_training.FP8, "tensorwise"} - set(words)
    assert in_fp8[in_fp8.index("--fp8-recipe") + 1] == "tensorwise"


@pytest.mark.full
@pytest.mark.ranks
def test_a_tiny_run(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name in CORPORA:
        write_documents(tmp_path / "corpus" / name)
    script = str(ROOT / "scripts/bench/plan/gpu_training.py")
    words = ["--device", "cpu", "--quick", "--steps", "4", "--folder", str(tmp_path), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["num_steps"] == 2
    assert figures["tokens_per_second"] > 0
    assert figures["tflops_per_gpu"] is not None
    assert len(figures["losses"]) == 4
