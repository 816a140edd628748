"""Losses of groups (``--loss``): DPO and its relatives in two passes over each step, and GRPO on recorded rollouts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.preferences import PreferenceConfig
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import Condition, above, equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

PAIR_NAMES = ("dpo", "ipo", "simpo", "orpo")
"""Names of ``LOSSES``, whose module imports torch."""
GRPO = "grpo"
DEFAULT_BETA = 0.04
DEFAULT_CLIP = 0.2


@dataclass(frozen=True)
class PreferenceOptions:
    """Flags of losses of groups.

    Attributes:
        loss: name of the loss, with its numbers after colons if they are given.
        reference_logprobs: sidecars of the reference model, one for each data set; None: none is given.
    """

    loss: str
    reference_logprobs: list[str] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of losses of groups."""
    group = parser.add_argument_group("bytescale: preferences")
    group.add_argument(
        "--loss",
        metavar="NAME[:BETA[:CLIP]]",
        help=f"Loss of pairs of answers, written by `bytescale corpus --sft --pairs`: {', '.join(PAIR_NAMES)}; or of "
        f"recorded rollouts, written by `bytescale corpus --sft --groups`: {GRPO}. BETA is the coefficient (0.1; 2 for "
        f"simpo); of {GRPO}, of the divergence from the reference model ({DEFAULT_BETA}; 0 needs no reference). CLIP "
        f"is how far from 1 a ratio of {GRPO} counts ({DEFAULT_CLIP}), or LOW,HIGH below and above 1.",
    )
    group.add_argument(
        "--reference-logprobs",
        nargs="+",
        metavar="PATH",
        help="Log-probabilities of the reference model, written by `bytescale logprobs`, one PATH for each data set.",
    )


def resolve(options: PreferenceOptions, run: RunConfig) -> PreferenceConfig:
    """Return the loss and its reference. Raises ValueError for an unknown loss, or sidecars that do not fit."""
    from bytescale_ext.data.corpus.sidecar import LOGPROBS, check_sidecar

    loss, is_first = parse_loss(options.loss), run.process.rank == 0
    prefixes, paths = run.get(AnswerLossConfig).prefixes, options.reference_logprobs or []
    for prefix in prefixes:
        (check_rollouts if loss.name == GRPO else check_pairs)(prefix, is_first)
    if len(paths) != (len(prefixes) if loss.needs_reference else 0):
        wanted = "a path for each data set" if loss.needs_reference else "no path"
        raise ValueError(f"--loss {options.loss} needs {wanted} of --reference-logprobs, and {len(paths)} are given")
    for prefix, path in zip(prefixes, paths, strict=False):
        check_sidecar(path, prefix, LOGPROBS, whole=is_first)
    return PreferenceConfig(loss.name, loss.beta, tuple(zip(prefixes, paths, strict=False)), loss.clip)


@dataclass(frozen=True)
class ParsedLoss:
    """Value of ``--loss``.

    Attributes:
        name: name of the loss.
        beta: its coefficient.
        clip: distances below and above 1 up to which the ratio of policies counts.
        needs_reference: whether it compares with a reference model.
    """

    name: str
    beta: float
    clip: tuple[float, float]
    needs_reference: bool


def parse_loss(text: str) -> ParsedLoss:
    """Return the loss of ``NAME[:BETA[:CLIP]]``. Raises ValueError for an unknown name or bad numbers."""
    from bytescale_ext.losses.preferences import loss_row

    name, *numbers = text.split(":")
    try:
        row = None if name == GRPO else loss_row(name)
        beta = float(numbers[0]) if numbers else DEFAULT_BETA if row is None else row.beta
        clip = [float(number) for number in numbers[1].split(",")] if numbers[1:] else [DEFAULT_CLIP]
    except ValueError as error:
        raise ValueError(f"--loss {text}: {error}") from None
    if len(numbers) > 2 or (row is not None and len(numbers) > 1):
        raise ValueError(f"--loss {text}: {name} takes {'a coefficient alone' if row else 'BETA and CLIP'}")
    if not (0 if row is None else 1e-300) <= beta < float("inf"):
        raise ValueError(f"--loss {text}: the coefficient must be a positive number{' or 0' if row is None else ''}")
    if len(clip) > 2 or not all(0 < part < float("inf") for part in clip) or clip[0] >= 1:
        raise ValueError(f"--loss {text}: CLIP is a number from 0 to 1, or LOW,HIGH, a number from 0 to 1 and another")
    return ParsedLoss(name, beta, (clip[0], clip[-1]), beta > 0 if row is None else row.needs_reference)


def check_pairs(prefix: str, is_first: bool) -> None:
    """Raise ValueError unless a data set has pairs; ``is_first``: whether to read the numbers too."""
    from bytescale_ext.data.corpus.sidecar import group_bounds

    advice = "write it with bytescale corpus --sft --pairs"
    try:
        bounds = group_bounds(prefix, whole=is_first)
    except ValueError as error:
        raise ValueError(f"{prefix} has no pairs of answers ({error}): {advice}") from error
    sizes = bounds[1:] - bounds[:-1]
    if (sizes != 2).any():
        group = int((sizes != 2).argmax())
        raise ValueError(f"{prefix}: group {group} has {int(sizes[group])} documents and is no pair: {advice}")


def check_rollouts(prefix: str, is_first: bool) -> None:
    """Raise ValueError unless a data set has rollouts; ``is_first``: whether to read the numbers too."""
    from bytescale_ext.data.corpus.sidecar import (
        ADVANTAGES,
        LOGPROBS,
        advantages_of,
        check_sidecar,
        group_bounds,
        old_logprobs_of,
    )

    group_bounds(prefix, whole=is_first)
    check_sidecar(advantages_of(prefix), prefix, ADVANTAGES, whole=is_first)
    try:
        check_sidecar(old_logprobs_of(prefix), prefix, LOGPROBS, whole=is_first)
    except ValueError as error:
        path = old_logprobs_of(prefix)
        raise ValueError(
            f"{error}: --loss {GRPO} reads the policy's log-probabilities from {path}, of bytescale corpus --logprobs "
            f"or of bytescale logprobs --output {path}"
        ) from error


def build(training: Training, runtime: Runtime) -> Training:
    """Train on groups: their data, and the loss of pairs or rollouts."""
    from megatron.bytescale.features.hdp import groups

    is_policy = runtime.run.get(PreferenceConfig).loss == GRPO
    return (groups.train_on_rollouts if is_policy else groups.train_on_pairs)(training, runtime)


OF_PAIRS = given("loss") & ~Condition(lambda args: str(args.loss).split(":")[0] == GRPO)
"""The loss is of pairs, whose step has two passes."""

REFUSALS = (
    refuse("--num-experts with a loss of pairs", "preferences", "remove one: the first pass would count the tokens of "
           "experts twice", given("num_experts") & OF_PAIRS),
    refuse("--hidden-dropout above 0", "preferences", "use --hidden-dropout 0: log-probabilities must not depend on it",
           above("hidden_dropout", 0.0)),
    refuse("--loss-normalization with a loss of pairs", "preferences", "remove it: the loss is a mean over pairs",
           equals("loss_normalization", "documents", "groups") & OF_PAIRS),
    refuse("--mtp-num-layers", "preferences", "leave it out"),
    refuse("--chunked-cross-entropy with a loss of pairs", "preferences", "leave it out",
           given("chunked_cross_entropy") & OF_PAIRS),
    refuse("--state-policy with a loss of pairs", "preferences", "leave it out: pages are planned for one pass",
           ~equals("state_policy", "resident") & OF_PAIRS),
)  # fmt: skip

PREFERENCES = Feature(
    name="preferences",
    flag="--loss",
    summary="losses of pairs of answers (DPO, IPO, SimPO, ORPO) and of recorded rollouts (GRPO)",
    add_arguments=add_arguments,
    is_on=given("loss"),
    options=PreferenceOptions,
    resolve=resolve,
    build=build,
    requires=("sft",),
    refusals=REFUSALS,
)
