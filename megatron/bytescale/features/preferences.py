"""Losses of pairs of answers (``--loss``): DPO and its relatives, in two passes over each step."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.preferences import PreferenceConfig
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import above, equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

NAMES = ("dpo", "ipo", "simpo", "orpo")
"""Names of ``LOSSES``, whose module imports torch."""


@dataclass(frozen=True)
class PreferenceOptions:
    """Flags of losses of pairs.

    Attributes:
        loss: name of the loss, with its coefficient after a colon if it is given.
        reference_logprobs: sidecars of the reference model, one for each data set; None: none is given.
    """

    loss: str
    reference_logprobs: list[str] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of losses of pairs."""
    group = parser.add_argument_group("bytescale: preferences")
    group.add_argument(
        "--loss",
        metavar="NAME[:BETA]",
        help=f"Loss of pairs of answers, written by `bytescale corpus --sft --pairs`: {', '.join(NAMES)}. BETA is its "
        "coefficient (0.1; 2 for simpo).",
    )
    group.add_argument(
        "--reference-logprobs",
        nargs="+",
        metavar="PATH",
        help="Log-probabilities of the reference model, written by `bytescale logprobs`, one PATH for each data set.",
    )


def resolve(options: PreferenceOptions, run: RunConfig) -> PreferenceConfig:
    """Return the loss and its reference. Raises ValueError for an unknown loss, or sidecars that do not fit."""
    from bytescale_ext.data.corpus.sidecar import LOGPROBS, check_sidecar, check_weights
    from bytescale_ext.losses.preferences import loss_row

    name, _, text = options.loss.partition(":")
    try:
        row = loss_row(name)
        beta = float(text) if text else row.beta
    except ValueError as error:
        raise ValueError(f"--loss {options.loss}: {error}") from None
    if not 0 < beta < float("inf"):
        raise ValueError(f"--loss {options.loss}: the coefficient must be a positive number")
    prefixes, paths = run.get(AnswerLossConfig).prefixes, options.reference_logprobs or []
    for prefix in prefixes:
        if check_weights(prefix, whole=False).group_size != 2:
            raise ValueError(f"{prefix} has no pairs of answers: write it with bytescale corpus --sft --pairs")
    if len(paths) != (len(prefixes) if row.needs_reference else 0):
        wanted = "a path for each data set" if row.needs_reference else "no path"
        raise ValueError(f"--loss {name} needs {wanted} of --reference-logprobs, and {len(paths)} are given")
    for prefix, path in zip(prefixes, paths, strict=False):
        check_sidecar(path, prefix, LOGPROBS, whole=run.process.rank == 0)
    return PreferenceConfig(name, beta, tuple(zip(prefixes, paths, strict=False)))


def build(training: Training, runtime: Runtime) -> Training:
    """Train on pairs: their data, two passes for each step, and the loss of pairs in the log."""
    from megatron.bytescale.features.hdp import pairs

    return pairs.train_on_pairs(training, runtime)


REFUSALS = (
    refuse("--num-experts", "preferences", "remove one: the first pass would count the tokens of experts twice"),
    refuse("--hidden-dropout above 0", "preferences", "use --hidden-dropout 0: both passes must agree",
           above("hidden_dropout", 0.0)),
    refuse("--hdp-global-tokens", "preferences", "use --global-batch-size, which counts pairs"),
    refuse("--loss-normalization documents", "preferences", "remove it: the loss is a mean over pairs",
           equals("loss_normalization", "documents")),
    refuse("--mtp-num-layers", "preferences", "leave it out"),
    refuse("--chunked-cross-entropy", "preferences", "leave it out"),
    refuse("--state-policy", "preferences", "leave it out: pages are planned for one pass",
           ~equals("state_policy", "resident")),
)  # fmt: skip

PREFERENCES = Feature(
    name="preferences",
    flag="--loss",
    summary="losses of pairs of answers (DPO, IPO, SimPO, ORPO) in two passes",
    add_arguments=add_arguments,
    is_on=given("loss"),
    options=PreferenceOptions,
    resolve=resolve,
    build=build,
    requires=("sft",),
    refusals=REFUSALS,
)
