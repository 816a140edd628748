"""DPO on pairs of answers: runs have the losses and gradients of an independent model in plain PyTorch, in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.corpora import write_documents
from tests.e2e.once import once
from tests.reference.kinds import KINDS, flags
from tests.reference.model import Model
from tests.reference.training import (
    OPTIMIZERS,
    SCALE,
    STEPS,
    Sizes,
    Trained,
    gradient_errors,
    place_of,
    run,
    train_steps,
)
from tests.sample import sampled

pytestmark = pytest.mark.ranks

PROMPTS = (20, 5, 100, 2, 30, 6, 1, 120, 12, 20, 5, 9)
ANSWERS = ((150, 90), (25, 7), (30, 20), (68, 3), (40, 40), (2, 9), (129, 60), (63, 64), (4, 20), (20, 12), (5, 15),
           (90, 1))  # fmt: skip
LENGTHS = tuple(prompt + answer for prompt, both in zip(PROMPTS, ANSWERS, strict=True) for answer in both)
BATCH = 4
BETA = 0.3
SETTINGS = replace(KINDS["plain"], length=192)
SHARED = sum(prompt - 1 for prompt in PROMPTS)
SHARED_ON_ONE_RANK = sum(
    prompt - 1
    for prompt, (first, second) in zip(PROMPTS, ANSWERS, strict=True)
    if prompt - 1 + first + 1 + second + 1 <= 136
)
"""The part of it in pairs that have at most 136 tokens then."""


@dataclass(frozen=True)
class Layout:
    """Ranks and words of a run, and the least number of tokens that are saved in three steps."""

    ranks: int
    words: str
    sizes: Sizes
    saved: int


LAYOUTS = {
    "one rank": Layout(1, "--hdp-tokens-per-rank 640", Sizes(), SHARED),
    "ranks": Layout(2, "--hdp-tokens-per-rank 512 --use-distributed-optimizer", Sizes(), 0),
    "rings": Layout(4, "--hdp-tokens-per-rank 64 --use-distributed-optimizer", Sizes(), 0),
    "groups in rings": Layout(2, "--hdp-tokens-per-rank 136", Sizes(), 1 + SHARED_ON_ONE_RANK),
    "slices": Layout(
        2, "--hdp-tokens-per-rank 512 --pipeline-model-parallel-size 2 --seq1f1b-slices 3", Sizes(stages=2), SHARED
    ),
    "pipeline, tensor parallelism": Layout(
        4,
        "--hdp-tokens-per-rank 640 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--make-vocab-size-divisible-by 64",
        Sizes(tensor=2, stages=2),
        SHARED,
    ),
}


@dataclass(frozen=True)
class Pairs:
    """Tokens of each document, and its log-probability under the reference model."""

    tokens: tuple[torch.Tensor, ...]
    references: tuple[float, ...]


def answer_of(document: int, length: int) -> torch.Tensor:
    """Return whether the labels of the first ``length`` tokens of a document are tokens of its answer."""
    return torch.arange(1, length) >= PROMPTS[document // 2]


def logprob(model: Model, tokens: torch.Tensor, document: int) -> torch.Tensor:
    """Return the log-probability of the answer of a document up to the limit."""
    kept = tokens[: SETTINGS.length]
    return -model.document((kept, kept[1:], answer_of(document, len(kept))))[0]


def write(folder: Path) -> tuple[Path, Pairs]:
    """Write pairs with all sidecars; both answers of a pair have equal prompts."""
    from bytescale_ext.data.corpus import sidecar

    prefix = write_documents(folder / "docs", LENGTHS, seed=3, copies=1)
    whole = torch.from_numpy(np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64))
    tokens = whole.split(list(LENGTHS))
    random, references, columns = np.random.default_rng(5), [], []
    for document, ids in enumerate(tokens):
        prompt = PROMPTS[document // 2]
        ids[:prompt] = tokens[document // 2 * 2][:prompt]
        numbers = -6 * random.random(len(ids), dtype=np.float32)
        columns.append(numbers)
        kept = numbers[1 : SETTINGS.length].astype(np.float64)
        references.append(float(kept[answer_of(document, len(kept) + 1).numpy()].sum()))
    whole.numpy().astype(np.uint16).tofile(f"{prefix}.bin")
    masks = [np.arange(len(ids)) >= PROMPTS[document // 2] for document, ids in enumerate(tokens)]
    name = str(prefix)
    files = [
        (sidecar.weights_of(name), sidecar.WEIGHTS, np.concatenate(masks).view(np.uint8)),
        (sidecar.groups_of(name), sidecar.GROUPS, (np.arange(len(tokens)) // 2).astype(np.int32)),
        (f"{name}.base", sidecar.LOGPROBS, np.concatenate(columns)),
    ]
    for path, kind, values in files:
        values.tofile(path + ".bin")
        sidecar.write_header(path, name, kind, values.dtype.name)
    return prefix, Pairs(tokens, tuple(references))


def train_plainly(pairs: Pairs, steps: Sequence[Sequence[int]]) -> Trained:
    """Train the reference on the documents of each step."""
    model = Model(SETTINGS, SCALE)

    def losses_of(documents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ratios = {one: logprob(model, pairs.tokens[one], one) - pairs.references[one] for one in documents}
        margins = torch.stack([ratios[one] - ratios[one + 1] for one in documents if one % 2 == 0])
        return torch.log1p(torch.exp(-BETA * margins)).mean(), torch.zeros(())

    return train_steps(model, steps, "adam", losses_of)


@pytest.mark.parametrize("name", sampled(LAYOUTS, ["slices"]))
def test_three_steps_of_pairs_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    layout, (prefix, pairs) = LAYOUTS[name], once(write, "pairs")
    words = ["--sft", "--loss", f"dpo:{BETA}", "--reference-logprobs", f"{prefix}.base", *OPTIMIZERS["adam"]]
    losses, names = run(tmp_path, prefix, layout.ranks, BATCH, [*flags(SETTINGS), *words, *layout.words.split()])
    steps = [[place_of(one)[0] for one in step] for step in names]
    assert sorted(number for step in steps for number in step) == list(range(len(LENGTHS)))
    wanted = train_plainly(pairs, steps)
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted.losses, rel=2e-5, abs=2e-6)
    errors = gradient_errors(tmp_path, layout.sizes, SETTINGS, wanted.gradients)
    assert errors.keys() == wanted.gradients.keys()
    assert {key: error for key, error in errors.items() if error > 2e-5} == {}
    copies = sum(min(length, SETTINGS.length) for length in LENGTHS)
    tokens = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["tokens_so_far"]
    assert copies - SHARED <= tokens <= copies - layout.saved
