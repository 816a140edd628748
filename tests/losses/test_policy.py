"""GRPO: values by its definition, and losses and gradients of rings, packs and slices, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bytescale_ext.config.hdp import NORMALIZATIONS
from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.data.samples.units import padding_units, units_of
from bytescale_ext.losses.policy import NAME, PolicyLoss, policy_losses
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.features import preferences
from megatron.bytescale.features.hdp.groups import report_policy
from tests.data.sources import MemorySource

LENGTHS = (16, 3, 9, 5, 1)
GROUPS = ((0, 1, 2), (3, 4))
PROMPTS = (6, 1, 2, 2, 1)
VOCABULARY = 7
LOSSES = {"grpo": PolicyLoss(), "no reference": PolicyLoss(0.0, 0.1, 0.3), "strong": PolicyLoss(1.5, 0.05, 0.05)}


def by_definition(loss: PolicyLoss, logprob: float, old: float, advantage: float, reference: float) -> float:
    """Return the loss of one token in plain Python."""
    ratio = math.exp(logprob) / math.exp(old)
    gain = min(ratio * advantage, min(max(ratio, 1 - loss.low), 1 + loss.high) * advantage)
    quotient = math.exp(reference) / math.exp(logprob)
    return -(gain - loss.beta * (quotient - math.log(quotient) - 1))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_tokens_are_those_of_the_paper(name: str) -> None:
    random = np.random.default_rng(1)
    logprobs, olds, references = -3 * random.random((3, 40))
    advantages = random.normal(size=40)
    numbers = torch.from_numpy(np.stack([olds, advantages, references], axis=1))
    found = policy_losses(LOSSES[name], torch.from_numpy(logprobs), numbers)
    wanted = [by_definition(LOSSES[name], *row) for row in zip(logprobs, olds, advantages, references, strict=True)]
    assert found.losses.tolist() == pytest.approx(wanted, rel=1e-12)
    ratios = np.exp(logprobs - olds)
    low, high = 1 - LOSSES[name].low, 1 + LOSSES[name].high
    assert (
        found.clipped.tolist() == (((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low))).tolist()
    )
    assert 0 < found.clipped.sum() < 40


class Answers(MemorySource):
    """Groups of documents in memory, whose tokens after a prompt are answers (``RolloutSource``, ``GroupSource``)."""

    def weights(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return 1 for answers: float32 [stop - start]."""
        places = np.arange(start, stop)
        return ((places >= PROMPTS[sample_id]) & (places < LENGTHS[sample_id])).astype(np.float32)

    def rollout_numbers(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return numbers from a seed: float32 [stop - start, 3]."""
        whole = np.random.default_rng(number).normal(size=(LENGTHS[number] + 1, 3)) - [2.0, 0.0, 2.0]
        return np.where(self.weights(number, start, stop)[:, None] != 0, whole[start:stop], 0.0).astype(np.float32)

    def members(self, number: int) -> tuple[int, ...]:
        """Return the documents of a document's group."""
        return next(group for group in GROUPS if number in group)

    def sample_lengths(self, samples: object) -> np.ndarray:
        """Not asked here: [0]."""
        return np.zeros(0)


def losses_of_rows(
    weight: torch.Tensor, positions: torch.Tensor, sequences: list[int], source: Answers
) -> torch.Tensor:
    """Return minus the log-probability of each row's label, [rows], of a model that a matrix [v, v] gives."""
    found = []
    for position, seq in zip(positions.tolist(), sequences, strict=True):
        ids = [*source.read(seq, position, position + 2).tolist(), 0][:2]
        found.append(-torch.log_softmax(weight[ids[0] % VOCABULARY] / (1 + position), 0)[ids[1] % VOCABULARY])
    return torch.stack(found)


def plain_loss(loss: PolicyLoss, weight: torch.Tensor, source: Answers, normalization: str) -> torch.Tensor:
    """Return the loss of the whole step, document by document."""
    of_tokens: dict[int, torch.Tensor] = {}
    for seq, length in enumerate(LENGTHS):
        places = torch.arange(PROMPTS[seq], length)
        if len(places):
            logprobs = -losses_of_rows(weight, places - 1, [seq] * len(places), source)
            old, advantage, reference = torch.from_numpy(source.rollout_numbers(seq, 0, length)).double()[places].T
            ratio = (logprobs - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - loss.low, 1 + loss.high) * advantage)
            of_tokens[seq] = loss.beta * ((reference - logprobs).exp() - (reference - logprobs) - 1) - gain
    parts = {"tokens": [range(5)], "documents": [[seq] for seq in range(5)], "groups": GROUPS}[normalization]
    means = [torch.cat([of_tokens[seq] for seq in part if seq in of_tokens]).mean()
             for part in parts if any(seq in of_tokens for seq in part)]  # fmt: skip
    return torch.stack(means).mean()


RANKS = (
    (MicroBatch((Shard(0, zigzag_ranges(16, 2, 0), (0, 1)), Shard(1, ((0, 3),), (0,)))), MicroBatch(())),
    (MicroBatch((Shard(0, zigzag_ranges(16, 2, 1), (0, 1)), Shard(4, ((0, 1),), (1,)))),
     MicroBatch((Shard(3, ((0, 5),), (1,)), Shard(2, ((0, 9),), (1,))))),
)  # fmt: skip


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_rings_packs_and_slices_have_the_gradient_of_one_process(
    name: str, num_slices: int, normalization: str
) -> None:
    source, loss = Answers(LENGTHS), LOSSES[name]
    weight = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight.requires_grad_()
    whole = plain_loss(loss, weight, source, normalization)
    (wanted,) = torch.autograd.grad(whole, weight)
    rule = None if num_slices == 1 else SliceRule(Slicing(num_slices))
    totals, counts, shares = [], [], []
    for rank, micro_batches in enumerate(RANKS):
        settings = LoaderSettings(rank, 1, rows_multiple=4, normalization=normalization)
        units = units_of(micro_batches, LENGTHS, rank, 4, rule)
        batches = settings.read(units, source, list(range(5)), LENGTHS)
        for packed in (*batches, *padding_units(num_slices, 4, None)):
            sequences = [shard.seq for shard in packed.micro_batch.shards for _ in range(shard.num_tokens)]
            rows = losses_of_rows(weight, packed.positions[: len(sequences)], sequences, source) if sequences else None
            far = torch.full((packed.num_rows - len(sequences),), 900.0, dtype=torch.float64)
            losses = far if rows is None else torch.cat([rows, far])

            def of_tokens(losses: torch.Tensor, packed=packed):  # type: ignore[no-untyped-def]
                return (losses * packed.loss_mask).sum(), packed.num_labels, {}

            total, count, report = report_policy(loss, packed, of_tokens, losses[None])
            totals.append(total)
            counts.append(count)
            shares.append(float(report["clipped ratios"][0]))
    divided = torch.stack(totals).sum() / sum(counts)
    (found,) = torch.autograd.grad(divided, weight)
    assert float(divided.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)  # weights of tokens are float32
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)
    if normalization == "tokens":
        assert float(divided.detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-13)
        assert sum(shares) == round(sum(shares)) > 0


GIVEN = {
    "grpo": ("grpo", 0.04, (0.2, 0.2), True),
    "grpo:0": ("grpo", 0.0, (0.2, 0.2), False),
    "grpo:0.1:0.3": ("grpo", 0.1, (0.3, 0.3), True),
    "grpo:0:0.2,0.28": ("grpo", 0.0, (0.2, 0.28), False),
    "simpo:3": ("simpo", 3.0, (0.2, 0.2), False),
    "ipo": ("ipo", 0.1, (0.2, 0.2), True),
}


@pytest.mark.parametrize("text", GIVEN)
def test_the_flag_gives_coefficients(text: str) -> None:
    assert preferences.parse_loss(text) == preferences.ParsedLoss(*GIVEN[text])
    assert preferences.GRPO == NAME
    assert PolicyLoss() == PolicyLoss(preferences.DEFAULT_BETA, preferences.DEFAULT_CLIP, preferences.DEFAULT_CLIP)


BAD = {
    "grpo:-1": "the coefficient must be a positive number or 0",
    "grpo:0:1": "CLIP is a number from 0 to 1, or LOW,HIGH",
    "grpo:0:0.2,0.2,0.2": "CLIP is a number",
    "grpo:0:0.2:3": "grpo takes BETA and CLIP",
    "grpo:nan": "the coefficient must be",
    "dpo:0.1:0.2": "dpo takes a coefficient alone",
    "dpo:0": "the coefficient must be a positive number",
    "dpo:x": "could not convert",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_coefficients_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--loss {text}: {BAD[text]}"):
        preferences.parse_loss(text)
