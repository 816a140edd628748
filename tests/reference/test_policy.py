"""GRPO on recorded rollouts: runs have the losses and gradients of an independent model in plain PyTorch, in float64.

The old log-probabilities are drawn near the log-probabilities under the first weights, so that only some of the ratios
are cut.
"""

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
from tests.reference.model import Document, Model
from tests.reference.settings import Settings
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

LENGTHS = (250, 190, 30, 12, 70, 70, 5, 130, 64, 65, 9, 40, 33, 200, 3, 90, 18, 100, 50, 8, 21)
GROUPS = (3, 2, 1, 2, 1, 3, 2, 1, 2, 1, 2, 1)
PROMPTS = (20, 5, 40, 2, 30, 6, 1, 1, 12, 20, 5, 9)
BATCH = 4
BETA, LOW, HIGH = 0.3, 0.2, 0.4
SETTINGS = replace(KINDS["plain"], length=192)
EXPERTS = replace(KINDS["softmax before"], length=192)
KEPT = [min(length, SETTINGS.length) for length in LENGTHS]


@dataclass(frozen=True)
class Layout:
    """Ranks and words of a run."""

    ranks: int
    words: str
    sizes: Sizes
    normalization: str
    settings: Settings = SETTINGS


LAYOUTS = {
    "rings": Layout(4, "--hdp-tokens-per-rank 64 --use-distributed-optimizer", Sizes(), "groups"),
    "slices, pipeline, tensor parallelism": Layout(
        4,
        "--hdp-tokens-per-rank 256 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --seq1f1b-slices 2 "
        "--chunked-cross-entropy 24 --make-vocab-size-divisible-by 64",
        Sizes(tensor=2, stages=2),
        "documents",
    ),
    "prompts computed once": Layout(
        4,
        "--hdp-tokens-per-rank 640 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--make-vocab-size-divisible-by 64",
        Sizes(tensor=2, stages=2),
        "tokens",
    ),
    "experts, prompts computed once": Layout(
        1,
        "--hdp-tokens-per-rank 640",
        Sizes(),
        "groups",
        EXPERTS,
    ),
    "experts on two ranks": Layout(
        2, "--hdp-tokens-per-rank 192 --expert-model-parallel-size 2", Sizes(expert=2), "documents", EXPERTS
    ),
    "pages of states": Layout(
        2,
        "--hdp-tokens-per-rank 192 --state-policy paged --state-page-mb 0.00390625 --state-host-gb 1",
        Sizes(),
        "tokens",
    ),
    "activations in host memory": Layout(
        2, "--hdp-tokens-per-rank 192 --activation-policy memo --host-memory-gb 0.05", Sizes(), "groups"
    ),
}


@dataclass(frozen=True)
class Rollout:
    """Tokens [n] of a document, numbers [n, 3] of its tokens, mask [n] of its answer, and number of its group."""

    tokens: torch.Tensor
    numbers: torch.Tensor
    is_answer: torch.Tensor
    group: int


class PolicyModel(Model):
    """The reference with the loss of a policy.

    Attributes:
        numbers: old log-probability, advantage and reference log-probability of the labels with a loss: [labels, 3].
        logprobs: their log-probabilities in the last document: [labels].
    """

    numbers = torch.zeros(1, 3)
    logprobs = torch.zeros(0)

    def cross_entropy(self, states: torch.Tensor, labels: torch.Tensor, has_loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the policy's losses of labels [m] with a loss; states: [n, h]."""
        logits = states[: len(labels)] @ self.weights["output_layer.weight"].T
        self.logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[has_loss, 0]
        old, advantage, reference = self.numbers.T
        ratio, quotient = torch.exp(self.logprobs - old), torch.exp(reference - self.logprobs)
        gain = torch.minimum(ratio * advantage, torch.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
        return (BETA * (quotient - torch.log(quotient) - 1) - gain).sum()


def write(folder: Path) -> tuple[Path, list[Rollout]]:
    """Write rollouts with all sidecars, and return the prefix and the rollouts."""
    from bytescale_ext.data.corpus import sidecar

    prefix = write_documents(folder / "docs", LENGTHS, seed=3, copies=1)
    whole = torch.from_numpy(np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64))
    tokens = whole.split(list(LENGTHS))
    random, model, rollouts = np.random.default_rng(5), PolicyModel(SETTINGS, SCALE), []
    groups = np.repeat(np.arange(len(GROUPS)), GROUPS)
    for group in range(len(GROUPS)):
        members = [tokens[number] for number in np.flatnonzero(groups == group)]
        for ids in members:
            ids[: PROMPTS[group]] = members[0][: PROMPTS[group]]
    whole.numpy().astype(np.uint16).tofile(f"{prefix}.bin")
    for ids, group in zip(tokens, groups.tolist(), strict=True):
        is_answer = torch.from_numpy(np.arange(len(ids)) >= PROMPTS[group])
        now = np.zeros(len(ids))
        with torch.no_grad():
            model.document((ids, ids[1:], torch.ones(len(ids) - 1, dtype=torch.bool)))
        now[1:] = model.logprobs.numpy()
        numbers = np.stack(
            [now + random.normal(size=len(ids)) / 4, np.full(len(ids), random.normal()), now + random.random(len(ids))]
        )
        found = torch.from_numpy((numbers * is_answer.numpy()).T.astype(np.float32)).double()
        rollouts.append(Rollout(ids, found, is_answer, group))
    name, columns = str(prefix), torch.cat([one.numbers for one in rollouts]).T.float().numpy()
    files = [
        (
            sidecar.weights_of(name),
            sidecar.WEIGHTS,
            torch.cat([one.is_answer for one in rollouts]).numpy().view(np.uint8),
        ),
        (sidecar.groups_of(name), sidecar.GROUPS, groups.astype(np.int32)),
        (sidecar.old_logprobs_of(name), sidecar.LOGPROBS, columns[0]),
        (sidecar.advantages_of(name), sidecar.ADVANTAGES, columns[1]),
        (f"{name}.base", sidecar.LOGPROBS, columns[2]),
    ]
    for path, kind, values in files:
        np.ascontiguousarray(values).tofile(path + ".bin")
        sidecar.write_header(path, name, kind, values.dtype.name)
    return prefix, rollouts


def train_plainly(rollouts: Sequence[Rollout], steps: Sequence[Sequence[int]], layout: Layout) -> Trained:
    """Train the reference on the documents of each step."""
    model = PolicyModel(layout.settings, SCALE)

    def losses_of(documents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        sums: dict[int, torch.Tensor] = {}
        counts: dict[int, int] = {}
        for number in documents:
            one, kept = rollouts[number], KEPT[number]
            has_loss = one.is_answer[1:kept]
            model.numbers = one.numbers[1:kept][has_loss]
            document: Document = one.tokens[:kept], one.tokens[1:kept], has_loss
            unit = {"tokens": 0, "documents": number, "groups": one.group}[layout.normalization]
            sums[unit] = sums.get(unit, torch.zeros(())) + model.document(document)[0]
            counts[unit] = counts.get(unit, 0) + int(has_loss.sum())
        return torch.stack([sums[unit] / counts[unit] for unit in sums]).mean(), torch.zeros(())

    return train_steps(model, steps, "adam", losses_of)


@pytest.mark.parametrize("name", sampled(LAYOUTS, list(LAYOUTS)[1:2]))
def test_three_steps_of_a_policy_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    layout, (prefix, rollouts) = LAYOUTS[name], once(write, "rollouts")
    words = ["--sft", "--loss", f"grpo:{BETA}:{LOW},{HIGH}", "--reference-logprobs", f"{prefix}.base"]
    words += ["--loss-normalization", layout.normalization, *OPTIMIZERS["adam"], *layout.words.split()]
    losses, names = run(tmp_path, prefix, layout.ranks, BATCH, [*flags(layout.settings), *words])
    steps = [[place_of(one)[0] for one in step] for step in names]
    assert sorted(number for step in steps for number in step) == list(range(len(LENGTHS)))
    for step in steps:
        groups = {rollouts[number].group for number in step}
        assert len(groups) == BATCH
        assert len(step) == sum(GROUPS[group] for group in groups), "a group is divided"
    wanted = train_plainly(rollouts, steps, layout)
    assert len(losses) == STEPS
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    shared = sum((size - 1) * (prompt - 1) for size, prompt in zip(GROUPS, PROMPTS, strict=True))
    if "once" in name:
        assert last["tokens_so_far"] == sum(KEPT) - shared
    else:
        assert sum(KEPT) - shared <= last["tokens_so_far"] <= sum(KEPT)
    assert losses == pytest.approx(wanted.losses, rel=2e-5, abs=2e-6)
    errors = gradient_errors(tmp_path, layout.sizes, layout.settings, wanted.gradients)
    assert errors.keys() == wanted.gradients.keys()
    assert {key: error for key, error in errors.items() if error > 2e-5} == {}
