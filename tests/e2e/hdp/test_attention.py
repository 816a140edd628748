"""Attention and positions of today's models train as one process of stock Megatron does: rings, packs, slices, TP 2."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.once import once
from tests.e2e.pipelines import (
    ONE_BY_ONE,
    PP2,
    TOLERANCE,
    check_gradients,
    run,
    train_and_record,
    train_one_by_one,
    whole_gradients,
)
from tests.e2e.training import HDP, MODEL

pytestmark = pytest.mark.ranks

MODELS = {
    "partial-scaled-rope": (
        "--rotary-percent 0.5 --rotary-interleaved --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 4 "
        "--no-rope-freq 2 --qk-layernorm"
    ),
    "yarn-windows-sinks": (
        "--position-embedding-type yarn --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 64 "
        "--softmax-type learnable --window-size 24,0 --window-attn-skip-freq 2"
    ),
    "windows-sinks": "--window-size 24,0 --window-attn-skip-freq 2 --softmax-type learnable",
    "windows": "--window-size 40,0 --window-attn-skip-freq [1,1,0,1] --softmax-type off-by-one",
}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()
SLICES = [*PP2, "--seq1f1b-slices", "3", "--hdp-tokens-per-rank", "128"]


@dataclass(frozen=True)
class Case:
    """A model on some ranks; the layout is in the flags."""

    model: str
    num_ranks: int
    flags: list[str] = field(default_factory=list)
    num_stages: int = 1
    tp_size: int = 1


CASES = {
    "partial-scaled-rope-slices": Case("partial-scaled-rope", 4, SLICES, num_stages=2),
    "yarn-windows-sinks-tp2": Case("yarn-windows-sinks", 4, [*TP2, "--hdp-tokens-per-rank", "128"], tp_size=2),
    "windows-sinks-rings": Case("windows-sinks", 4),
    "windows-slices": Case("windows", 4, [*SLICES, "--hdp-kept-keys", "200"], num_stages=2),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    model = [*MODEL, *MODELS[case.model].split()]
    (losses, expected), (plain, _) = (
        once(partial(train_oracle, corpus, one), "attention", one) for one in (model, MODEL)
    )
    assert losses != pytest.approx(plain, rel=10 * TOLERANCE)
    outcomes = run(corpus, tmp_path, case.num_ranks, [*HDP, *case.flags], train_and_record, model)
    check_gradients(case, tmp_path, expected)
    assert outcomes[-1].losses == pytest.approx(losses, rel=TOLERANCE)


def train_oracle(corpus: Path, model: list[str], folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the first gradients of one process of stock Megatron."""
    (outcome,) = run(corpus, folder, 1, ONE_BY_ONE, train_one_by_one, model)
    return outcome.losses, whole_gradients(folder, 1, 1)[0]
