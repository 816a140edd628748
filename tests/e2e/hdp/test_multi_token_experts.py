"""Multi-token prediction with experts, DeepSeek-V3's pair, trains as one process of stock Megatron does.

It routes every token, also the last ones of a document, which guess nothing; so does stock Megatron.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.corpora import documents
from tests.e2e.hdp.test_moe import (
    AUX,
    EP2,
    EXACT,
    SEED,
    SLICES,
    TOLERANCE,
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
# What each is compared with: rings on documents of all lengths; slices, with the auxiliary loss, on documents of which
# each is a micro-batch, as in one process.
CASES: dict[str, tuple[int, list[object], list[object]]] = {
    "rings": (4, [], EP2),
    "alone": (2, AUX, [*EP2, *SLICES, *WHOLE]),
}


@pytest.fixture(scope="module")
def corpus() -> Path:
    return documents(seed=SEED)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(
    name: str,
    corpus: Path,
    lone_documents: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    num_ranks, losses, flags = CASES[name]
    data, (one, many) = lone_documents if losses else corpus, (tmp_path / "one", tmp_path / "many")
    oracle = run_oracle(data, one, *EXACT, *DEPTH, *losses, *TWO_STEPS, entry=train_and_note_margins)
    margins = [float(margin) for margin in re.findall(r"^MARGIN (.*)$", oracle.text, re.MULTILINE)]
    assert min(margins) > 1e-6, "rounding errors may choose other experts: take another SEED"
    expected = gradients(one, Sizes.of([]))[0, 0]
    assert any("mtp" in key and key.endswith("router.weight") for key in expected)
    outcome = run(data, many, num_ranks, *HDP, *EXACT, *DEPTH, *losses, *flags, *TWO_STEPS)
    assert outcome.losses == pytest.approx(oracle.losses, rel=TOLERANCE)
    sizes = Sizes.of(flags)
    for (tp_rank, ep_rank), found in gradients(many, sizes).items():
        check_gradients(found, expected, sizes, tp_rank, ep_rank)
