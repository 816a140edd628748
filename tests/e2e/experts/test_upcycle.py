"""Experts made from a dense checkpoint compute the same function, and training continues from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.training import HDP, MODEL, TRAIN, train_once, train_ranks

pytestmark = pytest.mark.ranks

STEPS = 2
DENSE = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--ckpt-format", "torch_dist"]
# The first step is almost uniform over equal experts.
GATED = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--moe-dts-steps 2 --moe-dts-temperature 50 0.1 --expert-model-parallel-size 2"
).split()


def test_experts_compute_what_the_dense_model_does(corpus: Path, tmp_path: Path) -> None:
    """The next documents have the same loss as in the dense run, even with a gate and replicas."""
    dense = train_once(1, *DENSE, "--data-path", corpus, "--train-iters", STEPS + 1, "--save-interval", STEPS)
    flags = [*DENSE, *GATED, "--data-path", corpus, "--moe-use-upcycling", "--save", tmp_path, "--moe-expert-slots", 3]
    outcome = train_ranks(2, *flags, "--load", dense.save, "--ckpt-step", STEPS)[-1]
    assert outcome.losses[0] == pytest.approx(dense.losses[STEPS], rel=1e-5)
    assert outcome.losses[-1] < outcome.losses[0]
    assert next(re.finditer(r"([\d.]+) experts per token", outcome.text))[1] == "4.000"
    assert (tmp_path / f"iter_{STEPS + 1:07d}").is_dir()
