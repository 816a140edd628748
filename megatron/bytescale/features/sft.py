"""Supervised fine-tuning (``--sft``): conversations as documents, with a loss only on answers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.preferences import PreferenceConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.corpus.sidecar import check_weights, group_bounds
from megatron.bytescale.arguments.conditions import equals, given
from megatron.bytescale.arguments.data import DataPaths
from megatron.bytescale.arguments.options import Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: ``--sft`` is Megatron's flag."""


def before_checks(paths: DataPaths) -> Overrides:
    """Hide the flag from Megatron, which would average evaluation losses over micro-batches of varying sizes."""
    return {"sft": False, "trains_on_answers": True}


def resolve(paths: DataPaths, run: RunConfig) -> AnswerLossConfig:
    """Return the data sets. Raises ValueError for a data set without its own mask."""
    prefixes = paths.prefixes()
    if not prefixes:
        raise ValueError("no data: give the --data-path written by `bytescale corpus --sft`")
    for prefix in prefixes:
        check_weights(prefix, whole=run.process.rank == 0)
        if run.get(HdpConfig).loss_normalization == "groups":
            group_bounds(prefix, whole=run.process.rank == 0)
    return AnswerLossConfig(tuple(prefixes))


def build(training: Training, runtime: Runtime) -> Training:
    """Load conversations instead of documents, or groups of them. Losses of groups have their own samples."""
    from megatron.bytescale.features.hdp import build as hdp
    from megatron.bytescale.features.hdp import groups

    if runtime.run.find(PreferenceConfig) is not None:
        return training
    in_groups = runtime.hdp.loss_normalization == "groups"
    return (groups.train_on_groups if in_groups else hdp.train_on_answers)(training, runtime)


REFUSALS = (
    refuse("--hdp-loader ray", "sft", "use --hdp-loader local: answers are marked in Megatron's data sets",
           equals("hdp_loader", "ray")),
    refuse("--sculpt-windows", "sft", "leave it out: each conversation is already a sample"),
    refuse("--draft-heads", "sft", "remove one of them: heads learn from all tokens of a document"),
)  # fmt: skip

SFT = Feature(
    name="sft",
    flag="--sft",
    summary="supervised fine-tuning: conversations as documents, with a loss only on answers",
    add_arguments=add_arguments,
    is_on=given("sft") | given("trains_on_answers"),
    options=DataPaths,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    requires=("hdp",),
    refusals=REFUSALS,
)
