"""An annealing gate: equal for any number of expert ranks, resumable at any step, and finally Megatron's own router."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.hdp.test_moe import with_equal_weights
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, SavedRun, train_once, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

STEPS, ANNEALED = 8, 4
MOE = (
    "--num-experts 4 --moe-ffn-hidden-size 24 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --micro-batch-size 2"
).split()
TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax".split()
GATE = [
    *f"--moe-dts-steps {ANNEALED} --moe-dts-temperature 3 0.02 --moe-dts-threshold 0.02 --moe-dts-noise".split(),
    *TOP1,
]
# Computing is slow and links are fast, so that replicas pay off even for few tokens.
SLOTS = "--moe-expert-slots 3 --moe-placement-threshold 1.01 --moe-placement-speeds 1e-6 1000".split()
EP2 = ["--expert-model-parallel-size", 2]
ENTRY = partial(with_equal_weights, None)


def words(corpus: Path, *flags: object) -> list[object]:
    return [*MODEL, *TRAIN, *MOE, "--data-path", corpus, "--train-iters", STEPS, *flags]


@pytest.fixture(scope="module")
def gated(corpus: Path) -> SavedRun:
    return train_once(2, *words(corpus, *GATE, *EP2, "--save-interval", 2), entry=ENTRY)


def active(outcome: Outcome) -> list[float]:
    """Return the mean number of experts per token in each step while the gate anneals."""
    return [float(number) for number in re.findall(r"bytescale: ([\d.]+) experts per token", outcome.text)]


def moves(outcome: Outcome) -> int:
    """Return the new replicas of a run."""
    return sum(int(number) for number in re.findall(r"; (\d+) new replicas", outcome.text))


def last_weights(save: Path) -> list[dict[str, torch.Tensor]]:
    files = sorted((save / f"iter_{STEPS:07d}").glob("mp_rank_*/model_optim_rng.pt"))
    states = [torch.load(file, weights_only=False, map_location="cpu")["model"] for file in files]
    return [{name: one for name, one in state.items() if isinstance(one, torch.Tensor)} for state in states]


def test_tokens_have_fewer_and_fewer_experts(gated: SavedRun) -> None:
    found = active(gated.outcomes[-1])
    assert len(found) == ANNEALED
    assert found == sorted(found, reverse=True)
    assert found[0] > 3.5
    assert found[-1] < 2.0


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_process_or_two_with_all_experts(num_ranks: int, gated: SavedRun, corpus: Path) -> None:
    """The noise of the gates belongs to tokens."""
    outcome = train_ranks(num_ranks, *words(corpus, *GATE), entry=ENTRY)[-1]
    assert outcome.losses == pytest.approx(gated.losses, rel=1e-5)


@pytest.mark.full
def test_resumed_while_it_anneals(gated: SavedRun, corpus: Path) -> None:
    """Replicas exist from the second step on. Megatron does not log the loss of that step separately."""
    flags = [*GATE, *EP2, *SLOTS, "--load", gated.save, "--ckpt-step", 2, "--exit-interval", ANNEALED + 1]
    outcome = train_ranks(2, *words(corpus, *flags), entry=ENTRY)[-1]
    assert active(outcome) == pytest.approx(active(gated.outcomes[-1])[2:], abs=1e-3)
    assert outcome.losses[0] == gated.losses[2]
    assert outcome.losses[2] == pytest.approx(gated.losses[ANNEALED], rel=1e-5)
    assert moves(outcome) > 0


@pytest.mark.full
def test_after_it_the_router_is_megatrons(gated: SavedRun, corpus: Path, tmp_path: Path) -> None:
    """A run without the gate repeats the last steps from its checkpoint, bit for bit."""
    flags = [*EP2, *TOP1, "--load", gated.save, "--ckpt-step", ANNEALED, "--save", tmp_path]
    outcome = train_ranks(2, *words(corpus, *flags), entry=ENTRY)[-1]
    assert active(outcome) == []
    assert outcome.losses[0] == gated.losses[ANNEALED]
    for mine, expected in zip(last_weights(tmp_path), last_weights(gated.save), strict=True):
        assert mine.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in mine.items())


@pytest.mark.parametrize("later", sampled([[], ["--mtp-num-layers", 1]], [[]]), ids=lambda later: f"{later[1:] or 0}")
def test_documents_in_slices(later: list[object], corpus: Path, tmp_path: Path) -> None:
    flags = [
        *later,
        *HDP,
        "--hdp-log-dir",
        tmp_path,
        "--micro-batch-size",
        1,
        "--hdp-tokens-per-rank",
        256,
        "--train-iters",
        2,
        *GATE,
    ]
    alone = train_ranks(1, *words(corpus, *flags, "--moe-router-load-balancing-type", "none"), entry=ENTRY)[-1]
    shared = [*flags, "--moe-router-load-balancing-type", "none", *EP2, *SLOTS, "--seq1f1b-slices", 2]
    outcome = train_ranks(2, *words(corpus, *shared), entry=ENTRY)[-1]
    assert outcome.losses == pytest.approx(alone.losses, rel=1e-5)
    assert active(outcome) == pytest.approx(active(alone), abs=2e-3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["active_experts"] for row in rows] == pytest.approx([*active(alone), *active(outcome)], abs=1e-3)
    assert moves(outcome) > 0
