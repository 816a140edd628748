"""Multi-token prediction with experts, as in DeepSeek-V3, trains like one process of stock Megatron.

As in stock Megatron, it routes every token, even the last tokens of a document, which predict nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters
from tests.e2e.corpora import documents
from tests.e2e.hdp.test_moe import (
    AUX,
    EP2,
    EXACT,
    NUM_EXPERTS,
    PP2,
    RECOMPUTED,
    SEED,
    SLICES,
    TOLERANCE,
    TP2,
    TWO_STEPS,
    WHOLE,
    Sizes,
    check_gradients,
    gradients,
    lone_documents,  # noqa: F401  # a fixture
    run,
    run_oracle,
    train_and_note_margins,
)
from tests.e2e.training import HDP

pytestmark = pytest.mark.ranks

DEPTH = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5".split()
REPEATED = [*DEPTH, "--mtp-num-layers", 2, "--mtp-use-repeated-layer"]
BY_DOCUMENT = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1".split()
# Computing is slow and links are fast, so that replicas pay off even for few tokens.
SLOTS = "--moe-expert-slots 3 --moe-placement-threshold 1.01 --moe-placement-speeds 1e-6 1000".split()
# Sizes of the model. The second of its two layers has experts, and so has the layer of multi-token prediction.
SHAPE = ModelShape(
    2, 32, 4, 2, 8, 48, True, 128, num_expert_layers=1, expert_ffn_hidden=2 * 24 + 16, num_experts=NUM_EXPERTS,
    experts_per_token=2, shared_ffn_hidden=16, later_layers=1, later_experts=True,
)  # fmt: skip
# Ranks, flags of both runs, and flags of the ranks. Rings run documents of all lengths. The auxiliary loss needs the
# oracle's micro-batches, so with this loss slices run each document as a micro-batch.
CASES: dict[str, tuple[int, list[object], list[object]]] = {
    "rings": (4, [], EP2),
    "tensor-parallel": (4, [], [*EP2, *TP2]),
    "replicas": (4, [], [*EP2, *SLOTS]),
    "replicas-slices-pp2": (4, [], [*EP2, *PP2, *SLICES, *SLOTS]),
    "repeated": (4, REPEATED, [*EP2, *PP2]),
    "repeated-slices": (4, [*REPEATED, *BY_DOCUMENT], [*EP2, *PP2, *SLICES, *RECOMPUTED]),
    "repeated-tensor-parallel": (4, [*REPEATED, *BY_DOCUMENT], [*EP2, *TP2]),
    "alone": (2, AUX, [*EP2, *SLICES, *WHOLE]),
    "repeated-alone": (2, [*REPEATED, *AUX], [*EP2, *SLICES, *WHOLE]),
}


@pytest.fixture(scope="module")
def corpus() -> Path:
    return documents(seed=SEED)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(
    name: str,
    corpus: Path,
    lone_documents: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    num_ranks, losses, flags = CASES[name]
    data, (one, many) = lone_documents if "alone" in name else corpus, (tmp_path / "one", tmp_path / "many")
    oracle = run_oracle(data, one, *EXACT, *DEPTH, *losses, *TWO_STEPS, entry=train_and_note_margins)
    margins = [float(margin) for margin in re.findall(r"^MARGIN (.*)$", oracle.text, re.MULTILINE)]
    assert min(margins) > 1e-6, "rounding errors may choose other experts: take another SEED"
    expected = gradients(one, Sizes.of([]))[0, 0]
    assert any("mtp" in key and key.endswith("router.weight") for key in expected)
    shape = replace(SHAPE, vocab=len(expected["output_layer.weight"]), later_repeats="repeated" in name)
    shape = replace(shape, later_layers=1 + shape.later_repeats)
    assert sum(one.numel() for one in expected.values()) == num_parameters(shape) + expert_parameters(shape)
    outcome = run(data, many, num_ranks, *HDP, *EXACT, *DEPTH, *losses, *flags, *TWO_STEPS)
    assert outcome.losses == pytest.approx(oracle.losses, rel=TOLERANCE)
    assert bool(re.search(r"; [1-9]\d* new replicas", outcome.text)) == ("--moe-expert-slots" in flags)
    sizes = Sizes.of(flags)
    for (tp_rank, ep_rank), found in gradients(many, sizes).items():
        check_gradients(found, expected, sizes, tp_rank, ep_rank)
