"""Multi-token prediction (``--mtp-num-layers``) over documents: later tokens come from the loader."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.multi_token import MultiTokenConfig
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import given, where
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


@dataclass(frozen=True)
class MultiTokenOptions:
    """Megatron's flags of multi-token prediction.

    Attributes:
        mtp_num_layers: number of depths.
        mtp_loss_scaling_factor: total weight of their losses.
    """

    mtp_num_layers: int
    mtp_loss_scaling_factor: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flags are Megatron's."""


def resolve(options: MultiTokenOptions, run: RunConfig) -> MultiTokenConfig:
    """Return the depths and the weight of their losses."""
    return MultiTokenConfig(options.mtp_num_layers, options.mtp_loss_scaling_factor / options.mtp_num_layers)


def build(training: Training, runtime: Runtime) -> Training:
    """Give Megatron's layers the later tokens of documents, and report their losses."""
    from megatron.bytescale.core.models.gpt.multi_token import report_depths, use_later_tokens

    run = runtime.run
    config, chunks = run.get(MultiTokenConfig), run.find(LossChunks)
    use = partial(use_later_tokens, config, None if chunks is None else chunks.num_tokens, runtime.step)
    training.model.pre_wrap_hooks.append(use)
    return training.wrap_forward_step(partial(report_depths, config))


@dataclass(frozen=True)
class _Layout:
    """The layout of a pipeline; None: not given."""

    pipeline_model_parallel_layout: str | None

    def separates_depths(self) -> bool:
        """Return whether layers of multi-token prediction are in another part than the output layer."""
        return "m" in str(self.pipeline_model_parallel_layout or "").rpartition("|")[0]


REFUSALS = (
    refuse("--moe-use-upcycling", "multi_token", "remove it: Megatron upcycles only the model's own layers"),
    refuse("--pipeline-model-parallel-layout with m before L", "multi_token", "move m to the last part: the layers run "
           "where the output layer is", where(_Layout, _Layout.separates_depths)),
)  # fmt: skip

MULTI_TOKEN = Feature(
    name="multi_token",
    flag="--mtp-num-layers",
    summary="multi-token prediction over documents: layers that predict tokens further ahead",
    add_arguments=add_arguments,
    is_on=given("hybrid_data_parallel") & given("mtp_num_layers"),
    options=MultiTokenOptions,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
