"""Three steps of a real run and of the reference, from the same weights, documents and optimizer settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.e2e.oracle import draw_weights_by_name, shard_of
from tests.e2e.pipelines import plan_once
from tests.e2e.training import documents_in_order, print_step, step_losses, train_ranks, train_with
from tests.reference.model import Document, Model, Weights
from tests.reference.settings import Settings

STEPS = 3
SCALE = 0.2
RATE = 1e-2
DECAY = 0.1
EPSILON = 1e-4
"""Adam's epsilon, far above the rounding of gradients: an update of a gradient that rounding makes is far below it."""
OPTIMIZERS = {
    "adam": f"--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps {EPSILON} --weight-decay {DECAY}".split(),
    "sgd": "--optimizer sgd --sgd-momentum 0.9 --weight-decay 0".split(),
}
TRAIN = (
    f"--train-iters {STEPS} --lr {RATE} --lr-decay-style constant --clip-grad 0 --log-interval 1 --eval-iters 0 "
    "--eval-interval 1000 --save-interval 1000 --num-workers 0 --split 100,0,0 --no-one-logger --ckpt-format torch "
    "--hybrid-data-parallel --hdp-plan-ahead 1"
).split()


@dataclass(frozen=True)
class Sizes:
    """Ranks that share a layer, its experts and one expert, and number of pipeline stages."""

    tensor: int = 1
    stages: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Trained:
    """Results of three steps.

    Attributes:
        losses: mean loss of the labels of each step.
        gradients: gradients of the first step by name in the whole model; in a run, with the tensor-parallel rank.
        clipped: number of heads that were clipped after each step.
        largest: largest score of all heads and layers in each step, without multi-token prediction.
    """

    losses: list[float]
    gradients: Weights
    clipped: list[int] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)


def start_from_named_weights() -> None:
    """Entry that draws all parameters by name, and prints the documents of each step."""
    plan_once(num_idle=0)
    draw_weights_by_name(SCALE, everything=True)
    train_with(print_step)


def run(
    folder: Path, corpus: Path, num_ranks: int, batch: int, flags: Sequence[object]
) -> tuple[list[float], list[list[str]]]:
    """Train on CPU ranks; return the loss of each step and the documents of each step. Files are in ``folder``."""
    saving = ["--save", folder, "--save-wgrads-interval", 1, "--hdp-log-dir", folder, "--global-batch-size", batch]
    outcomes = train_ranks(num_ranks, *TRAIN, "--data-path", corpus, *saving, *flags, entry=start_from_named_weights)
    assert outcomes[0].code is None, outcomes[0].text[-1000:]
    return step_losses(folder), documents_in_order(outcomes)


def place_of(name: str) -> tuple[int, int, int]:
    """Return (document, start, stop) of a sample that a run names ``"... document 12 tokens 0-64"``."""
    found = re.search(r"document (\d+) tokens (\d+)-(\d+)", name)
    assert found, name
    number, start, stop = map(int, found.groups())
    return number, start, stop


class Samples:
    """Samples of a data set of 16-bit tokens, with a mask of answers if only answers have a loss."""

    def __init__(self, corpus: Path, lengths: Sequence[int], settings: Settings) -> None:
        tokens = torch.from_numpy(np.fromfile(f"{corpus}.bin", dtype=np.uint16).astype(np.int64))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if settings.only_answers:
            mask = torch.from_numpy(np.fromfile(f"{corpus}.weights.bin", dtype=np.uint8).astype(bool))
        self.tokens, self.masks = tokens.split(list(lengths)), mask.split(list(lengths))
        self.only_answers = settings.only_answers

    def at(self, place: tuple[int, int, int]) -> Document:
        """Return a sample. Its last token has a label if the document goes on, except in conversations."""
        number, start, stop = place
        after = slice(start + 1, stop if self.only_answers else stop + 1)
        return self.tokens[number][start:stop], self.tokens[number][after], self.masks[number][after]


def places(lengths: Sequence[int], longest: int, only_answers: bool = False) -> list[tuple[int, int, int]]:
    """Return (document, start, stop) of each sample: documents, cut every ``longest`` tokens.

    Conversations end at the first cut, and need a label.
    """
    if only_answers:
        return [(number, 0, min(length, longest)) for number, length in enumerate(lengths) if length > 1]
    return [
        (number, start, min(start + longest, length))
        for number, length in enumerate(lengths)
        for start in range(0, length, longest)
    ]


def train_reference(settings: Settings, steps: Sequence[Sequence[Document]], optimizer: str) -> Trained:
    """Train the reference on the documents of each step."""
    model = Model(settings, SCALE)

    def losses_of(documents: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = sum(int(has_loss.sum()) for _, _, has_loss in documents)
        results = [model.document(one) for one in documents]
        mean = torch.stack([loss for loss, _ in results]).sum() / labels
        later = torch.stack([loss for _, loss in results]).sum() / labels
        z_loss = sum((torch.cat(router.z_losses).mean() for router in model.routers.values()), torch.zeros(()))
        coefficient = settings.experts.z_loss if settings.experts else 0.0
        balance = torch.zeros(())
        if settings.experts and (settings.experts.document_loss or settings.experts.step_loss):
            num_tokens = sum(len(tokens) for tokens, _, _ in documents)
            balance = sum((router.balance_losses(num_tokens) for router in model.routers.values()), balance)
        return mean, later + coefficient * z_loss + balance

    return train_steps(model, steps, optimizer, losses_of)


def train_steps[Step](
    model: Model,
    steps: Sequence[Step],
    optimizer: str,
    losses_of: Callable[[Step], tuple[torch.Tensor, torch.Tensor]],
) -> Trained:
    """Train a model; ``losses_of``: the loss that a step reports, and further losses, each []."""
    update = make_optimizer(model, optimizer)
    losses, first, clipped, largest = [], {}, [], []
    for step in steps:
        update.zero_grad()
        reported, others = losses_of(step)
        (reported + others).backward()
        losses.append(reported.item())
        if not first:
            first = {name: weight.grad.clone() for name, weight in model.weights.items() if weight.grad is not None}
        update.step()
        largest.append(max(float(top.max()) for name, top in model.largest.items() if name.startswith("decoder.")))
        clipped.append(model.clip())
        for router in model.routers.values():
            router.end_step()
    return Trained(losses, first, clipped, largest)


def make_optimizer(model: Model, name: str) -> torch.optim.Optimizer:
    """Return torch's own optimizer. Weight decay is for matrices only."""
    if name == "sgd":
        return torch.optim.SGD(model.weights.values(), RATE, momentum=0.9)
    groups = [
        {"params": [one for one in model.weights.values() if one.dim() > 1], "weight_decay": DECAY},
        {"params": [one for one in model.weights.values() if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), eps=EPSILON)


def saved_gradients(folder: Path, sizes: Sizes, settings: Settings) -> list[tuple[str, int, torch.Tensor]]:
    """Return (name in the whole model, tensor-parallel rank, shard) of each gradient saved in the first step."""
    found = []
    for file in sorted((folder / "wgrads" / "iter_0000001").glob("mp_rank_*")):
        numbers = [int(number) for number in file.stem.split("_")[2:]]
        stage = numbers[1] if sizes.stages > 1 else 0
        expert_rank = numbers[-1] if sizes.expert > 1 else 0
        (chunk,) = torch.load(file, weights_only=False).values()
        for name, gradient in chunk.items():
            if "_extra" not in name and not is_unused(name, gradient, settings):
                found.append((whole_name(name, stage, expert_rank, sizes, settings), numbers[0], gradient))
    return found


def is_unused(name: str, gradient: torch.Tensor, settings: Settings) -> bool:
    """Return whether nothing reads a parameter: the output weight [v, h] if later tokens share the embedding."""
    return settings.is_tied and settings.depths > 0 and name == "output_layer.weight" and not gradient.any()


def whole_name(name: str, stage: int, expert_rank: int, sizes: Sizes, settings: Settings) -> str:
    """Return the name in the whole model of a parameter on a stage and an expert-parallel rank."""
    first = stage * (settings.layers // sizes.stages)
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda layer: str(int(layer[0]) + first), name)
    if settings.experts is not None:
        before = expert_rank * (settings.experts.count // sizes.expert)
        name = re.sub(r"(?<=local_experts\.)\d+", lambda number: str(int(number[0]) + before), name)
    if settings.is_tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return name


def gradient_errors(folder: Path, sizes: Sizes, settings: Settings, expected: Weights) -> dict[str, float]:
    """Return, by name, the largest error of a parameter's shards, relative to the norm of the whole gradient."""
    errors: dict[str, float] = {}
    for name, rank, found in saved_gradients(folder, sizes, settings):
        whole = expected[name]
        part = shard_of(whole, name, found, rank, sizes.tensor, settings.activation == "swiglu")
        error = float((found.double() - part).norm() / whole.norm().clamp_min(1e-4))
        errors[name] = max(error, errors.get(name, 0.0))
    return errors
