"""Output layer and loss in chunks of tokens, so that the logits of a long sequence are never all in memory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import chosen, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


@dataclass(frozen=True)
class LossOptions:
    """Flags of the loss.

    Attributes:
        chunked_cross_entropy: tokens of a chunk.
    """

    chunked_cross_entropy: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the loss in chunks."""
    group = parser.add_argument_group("bytescale: loss")
    group.add_argument(
        "--chunked-cross-entropy",
        type=int,
        metavar="TOKENS",
        help="Compute output layer and loss for TOKENS tokens at a time, and again in the backward pass, so that the "
        "logits of a long sequence are never all in memory. The weight gradient is summed in float32. Works without an "
        "activation policy.",
    )


def resolve(options: LossOptions, run: RunConfig) -> LossChunks:
    """Return the number of tokens per chunk."""
    return LossChunks(options.chunked_cross_entropy)


def build(training: Training, runtime: Runtime) -> Training:
    """Compute the loss in chunks of tokens, in each model chunk with the output layer."""
    from megatron.bytescale.core.models.gpt.chunked_loss import use_chunked_loss

    training.model.pre_wrap_hooks.append(partial(use_chunked_loss, runtime.run.get(LossChunks).num_tokens))
    return training


REFUSALS = (
    refuse("--defer-embedding-wgrad-compute", "loss_chunks"),
    refuse("--mtp-num-layers without --hybrid-data-parallel", "loss_chunks", "add --hybrid-data-parallel, which "
           "also computes its losses in chunks", given("mtp_num_layers") & ~given("hybrid_data_parallel")),
    refuse("--logits-save-dir", "loss_chunks"),
    refuse("--output-logit-dtype", "loss_chunks", "remove it: chunks have the type of the output layer's input",
           given("logit_dtype")),
)  # fmt: skip

LOSS_CHUNKS = Feature(
    name="loss_chunks",
    flag="--chunked-cross-entropy",
    summary="the loss in chunks of tokens: logits of a long sequence are never all in memory",
    add_arguments=add_arguments,
    is_on=chosen("chunked_cross_entropy"),
    options=LossOptions,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
