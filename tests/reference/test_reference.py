"""Runs have the losses, gradients and weight updates of an independent model in plain PyTorch.

The loss of the third step depends on all weights that two updates have changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.corpora import documents, write_documents
from tests.e2e.once import once
from tests.e2e.training import step_losses
from tests.reference.cases import CASES, Case
from tests.reference.kinds import KINDS, flags
from tests.reference.training import (
    STEPS,
    Samples,
    gradient_errors,
    place_of,
    places,
    run,
    train_reference,
)
from tests.sample import sampled

pytestmark = pytest.mark.ranks

LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 1e-5


SAMPLE = (
    "classic-one-selective-adam-128",
    "partial_interleaved-4-pp2-memo-adam-256",
    "window_and_sinks-4-zero1-chunks-adam-256",
    "later_token-pp2-slices-chunks-adam-256",
    "later_tokens_experts-ep2-full-sgd-128",
    "balanced_steps-pp2-slices-full-sgd-128",
    "latent_experts-pp2-slices-selective-adam-128",
    "windows-pp2-slices-sgd-256",
    "zero_sinks-pp2-full-sgd-128",
    "answers_experts-pp2-offload-adam-256",
    "clipped-4-zero1-adam-256",
    "clipped_latent-2-slices-full-adam-256",
)
"""Combinations in `make test`: each policy and optimizer, and a model of each family. `make test-all` has all."""

ROWS = sampled(CASES, [case for case in CASES if case.name in SAMPLE])


def corpus_of(case: Case) -> Path:
    """Return the prefix of the data set of a case, which is written once in a test session."""
    if not KINDS[case.kind].only_answers:
        return documents(case.lengths, case.seed, copies=1)
    return once(partial(write_conversations, case), "conversations", case.lengths, case.length, case.seed)


def write_conversations(case: Case, folder: Path) -> Path:
    """Write documents with a mask of answers: a third of the tokens, and the last token that fits."""
    from bytescale_ext.data.corpus.sidecar import WEIGHTS, weights_of, write_header

    prefix = write_documents(folder / "docs", case.lengths, case.seed, copies=1)
    masks = np.random.default_rng(case.seed).random(sum(case.lengths)) < 0.3
    starts = np.cumsum(case.lengths) - case.lengths
    masks[starts + np.minimum(case.lengths, case.length) - 1] = True
    masks.astype(np.uint8).tofile(f"{prefix}.weights.bin")
    write_header(weights_of(str(prefix)), str(prefix), WEIGHTS, "uint8")
    return prefix


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_three_steps_are_those_of_the_reference(case: Case, tmp_path: Path) -> None:
    settings = replace(KINDS[case.kind], length=case.length)
    corpus = corpus_of(case)
    wanted = places(case.lengths, case.length, settings.only_answers)
    layout = case.layout_value
    losses, names = run(tmp_path, corpus, layout.ranks, len(wanted) // STEPS, [*flags(settings), *case.flags()])
    steps = [[place_of(name) for name in step] for step in names]
    assert sorted(place for step in steps for place in step) == wanted
    samples = Samples(corpus, case.lengths, settings)
    expected = train_reference(settings, [[samples.at(place) for place in step] for step in steps], case.optimizer)
    if settings.clip is not None:
        logits = step_losses(tmp_path, "max_attention_logit")
        assert logits == pytest.approx(expected.largest, rel=LOGIT_TOLERANCE)
    assert all(expected.clipped[:-1]) == (settings.clip is not None)
    assert losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    errors = gradient_errors(tmp_path, layout.sizes, settings, expected.gradients)
    assert errors.keys() == expected.gradients.keys()
    assert {name: error for name, error in errors.items() if error > GRADIENT_TOLERANCE} == {}
