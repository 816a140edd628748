"""Multi-token prediction trains as one process of stock Megatron does, one document at a time: rings, slices, TP 2."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.once import once
from tests.e2e.pipelines import (
    FULL,
    ONE_BY_ONE,
    PP2,
    TOLERANCE,
    check_gradients,
    run,
    train_and_record,
    train_one_by_one,
    whole_gradients,
)
from tests.e2e.training import HDP, MODEL, Outcome

pytestmark = pytest.mark.ranks

DEPTHS = [*MODEL, *"--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5".split()]
CHUNKS = ["--chunked-cross-entropy", "24"]


@dataclass(frozen=True)
class Case:
    """A layout, in the flags."""

    num_ranks: int
    flags: list[str] = field(default_factory=list)
    num_stages: int = 1
    tp_size: int = 1


CASES = {
    "rings": Case(4, CHUNKS),
    "slices": Case(4, [*PP2, "--seq1f1b-slices", "3", "--hdp-tokens-per-rank", "128"], num_stages=2),
    "tp2": Case(4, [*"--tensor-model-parallel-size 2 --hdp-tokens-per-rank 128".split(), *FULL], tp_size=2),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    losses, expected = once(partial(train_oracle, corpus), "multi-token")
    outcomes = run(corpus, tmp_path, case.num_ranks, [*HDP, *case.flags], train_and_record, DEPTHS)
    assert any("mtp.layers.1.mtp_model_layer" in name for name in expected)
    check_gradients(case, tmp_path, expected)
    assert outcomes[-1].losses == pytest.approx(losses, rel=TOLERANCE)
    for depth in (1, 2):  # random tokens: about the logarithm of the vocabulary
        assert all(3 < loss < 7 for loss in depth_losses(outcomes[-1], depth))
        assert len(depth_losses(outcomes[-1], depth)) == len(losses)


def train_oracle(corpus: Path, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the first gradients of one process of stock Megatron."""
    (outcome,) = run(corpus, folder, 1, ONE_BY_ONE, train_one_by_one, DEPTHS)
    return outcome.losses, whole_gradients(folder, 1, 1)[0]


def depth_losses(outcome: Outcome, depth: int) -> list[float]:
    return [float(value) for value in re.findall(rf"\| mtp_{depth} loss: ([-\d.E+]+)", outcome.text)]
