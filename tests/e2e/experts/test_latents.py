"""Experts of latents (``--moe-latent-size``) with replicas, gates, pages and DeepEP train like one process.

tests/reference compares their rings, pipelines, slices and policies with an independent model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters
from tests.e2e.corpora import documents
from tests.e2e.hdp.test_moe import (
    EP2,
    EXACT,
    FLEX,
    HYBRID,
    MOE,
    NUM_EXPERTS,
    PP2,
    SEED,
    SLICES,
    TOLERANCE,
    TP2,
    TWO_STEPS,
    Sizes,
    check_gradients,
    gradients,
    run,
    with_equal_weights,
)
from tests.e2e.pipelines import SHARDED
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

LATENT = ["--moe-latent-size", 12]
# Sizes of the model without shared experts. The second of its two layers has experts.
SHAPE = ModelShape(
    2, 32, 4, 2, 8, 48, True, 128, num_expert_layers=1, expert_ffn_hidden=2 * 24, num_experts=NUM_EXPERTS,
    experts_per_token=2, expert_latent=12,
)  # fmt: skip
ONE = ["--hdp-tokens-per-rank", 512]
# Computing is slow and links are fast, so that replicas pay off even for few tokens.
SLOTS = "--moe-expert-slots 3 --moe-placement-threshold 1.01 --moe-placement-speeds 1e-6 1000".split()
MEASURED = "--moe-expert-slots 3 --moe-placement-threshold 1.01".split()
SOFTMAX = "--moe-router-score-function softmax --moe-router-load-balancing-type none --moe-z-loss-coeff 1e-2".split()
GATE = [*SOFTMAX, *"--moe-dts-steps 4 --moe-dts-temperature 0.6 0.2 --moe-dts-threshold 0.1".split()]
PAGED = "--state-policy paged --state-page-mb 0.00390625 --state-host-gb 1".split()
CASES: dict[str, tuple[list[str], int, list[object]]] = {
    "replicas": (EXACT, 4, [*EP2, *SHARDED, *SLOTS]),
    "replicas-tp2-slices": (EXACT, 4, [*EP2, *TP2, *SLICES, *SLOTS]),
    "replicas-pp2-slices": (EXACT, 4, [*EP2, *PP2, *SLICES, *SLOTS]),
    "measured": (EXACT, 2, [*EP2, "--hdp-tokens-per-rank", 256, *MEASURED]),
    "gate": (GATE, 4, EP2),
    "gate-replicas-slices": (GATE, 4, [*EP2, *SLICES, *SLOTS]),
    "deepep-replicas": (EXACT, 4, [*FLEX, *EP2, *SHARDED, *SLOTS]),
    "hybridep-replicas-tp2": (EXACT, 4, [*HYBRID, *EP2, *TP2, *SLOTS]),
    "deepep-gate-replicas-slices": (GATE, 4, [*FLEX, *EP2, *SLICES, *SLOTS]),
    "hybridep-gate-pp2": (GATE, 4, [*HYBRID, *EP2, *PP2]),
    "deepep-gate-tp2": (GATE, 4, [*FLEX, *EP2, *TP2]),
    "pages": (EXACT, 4, [*EP2, *PAGED, "--use-distributed-optimizer"]),
}


@pytest.fixture(scope="module")
def corpus() -> Path:
    return documents(seed=SEED)


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Path]]:
    """One process with each router."""
    found = {}
    for name, router in (("exact", EXACT), ("gate", GATE)):
        save = tmp_path_factory.mktemp(name)
        found[name] = run(corpus, save, 1, *HDP, *LATENT, *router, *ONE), save
    return found


@pytest.mark.parametrize("name", sampled(CASES, ["replicas-pp2-slices"]))
def test_losses_and_gradients_are_those_of_one_process(
    name: str, corpus: Path, alone: dict[str, tuple[Outcome, Path]], tmp_path: Path
) -> None:
    router, num_ranks, flags = CASES[name]
    one, save = alone["gate" if router is GATE else "exact"]
    outcome = run(corpus, tmp_path, num_ranks, *HDP, *LATENT, *router, *flags, *TWO_STEPS)
    assert outcome.losses == pytest.approx(one.losses[:2], rel=TOLERANCE)
    assert ("measured at start in" in outcome.text) == (name == "measured")
    if name != "measured":  # its replicas depend on this machine
        assert bool(re.search(r"; [1-9]\d* new replicas", outcome.text)) == ("--moe-expert-slots" in flags)
    expected, sizes = gradients(save, Sizes.of([]))[0, 0], Sizes.of(flags)
    shape = replace(SHAPE, vocab=len(expected["output_layer.weight"]))
    if router is EXACT:
        shape = replace(shape, expert_ffn_hidden=SHAPE.expert_ffn_hidden + 16, shared_ffn_hidden=16)
    assert sum(one.numel() for one in expected.values()) == num_parameters(shape) + expert_parameters(shape)
    for (tp_rank, ep_rank), found in gradients(tmp_path, sizes).items():
        check_gradients(found, expected, sizes, tp_rank, ep_rank)


@pytest.mark.full
def test_resumed_on_other_ranks(corpus: Path, alone: dict[str, tuple[Outcome, Path]], tmp_path: Path) -> None:
    def part(num_ranks: int, *flags: object) -> Outcome:
        return train_ranks(num_ranks, *MODEL, *TRAIN, *MOE, "--data-path", corpus, *HDP, *LATENT, *EXACT,
                           "--ckpt-format", "torch_dist", "--use-distributed-optimizer", *EP2, *flags,
                           entry=partial(with_equal_weights, None))[-1]  # fmt: skip

    begun = part(2, "--hdp-tokens-per-rank", 256, "--save", tmp_path, "--exit-interval", 2, *SLOTS)
    assert begun.code == 0
    resumed = part(4, *PP2, "--load", tmp_path)
    assert [*begun.losses, *resumed.losses] == pytest.approx(alone["exact"][0].losses, rel=TOLERANCE)
