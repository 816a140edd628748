"""Supervised fine-tuning (``--sft``): conversations as documents, and a loss of their answers alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.corpus.mask_file import check_mask
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: ``--sft`` is a flag of Megatron's."""


def before_checks(args: Any) -> None:
    """Take the flag from Megatron, which would average losses of evaluation over micro-batches: those of a plan."""
    args.sft, args.trains_on_answers = False, True


def resolve(args: Any, run: RunConfig) -> AnswerLossConfig:
    """Return the data sets. Raises ValueError for one without a mask, or with that of another."""
    from megatron.bytescale.training.stock import data_prefixes

    prefixes = data_prefixes(args)
    if not prefixes:
        raise ValueError("no data: give the --data-path that bytescale corpus --sft has written")
    for prefix in prefixes:
        check_mask(prefix, whole=run.process.rank == 0)
    return AnswerLossConfig(tuple(prefixes))


def build(training: Training, runtime: Runtime) -> Training:
    """Load conversations in place of documents."""
    from megatron.bytescale.features.hdp import build as hdp

    return hdp.train_on_answers(training, runtime)


REFUSALS = (
    refuse("--hdp-loader ray", "sft", "use --hdp-loader local: answers are marked in Megatron's data sets",
           lambda a: a.hdp_loader == "ray"),
    refuse("--sculpt-windows", "sft", "leave it out: a conversation is a sample by itself"),
    refuse("--draft-heads", "sft", "remove one of them: heads learn from all tokens of a document"),
)  # fmt: skip

SFT = Feature(
    name="sft",
    flag="--sft",
    summary="supervised fine-tuning: conversations as documents, a loss of their answers alone",
    add_arguments=add_arguments,
    is_on=lambda args: any(getattr(args, name, False) for name in ("sft", "trains_on_answers")),
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    requires=("hdp",),
    refusals=REFUSALS,
)
