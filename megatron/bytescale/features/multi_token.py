"""Multi-token prediction (``--mtp-num-layers``) over documents: later tokens come from the loader."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.multi_token import MultiTokenConfig
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flags are Megatron's."""


def resolve(args: Any, run: RunConfig) -> MultiTokenConfig:
    """Return the depths and their weight."""
    return MultiTokenConfig(args.mtp_num_layers, args.mtp_loss_scaling_factor / args.mtp_num_layers)


def build(training: Training, runtime: Runtime) -> Training:
    """Give Megatron's layers the later tokens of documents, and report their losses."""
    from megatron.bytescale.core.models.gpt.multi_token import report_depths, use_later_tokens

    run = runtime.run
    config, chunks = run.get(MultiTokenConfig), run.find(LossChunks)
    use = partial(use_later_tokens, config, None if chunks is None else chunks.num_tokens, runtime)
    training.model.pre_wrap_hooks.append(use)
    return training.wrap_forward_step(partial(report_depths, config))


def _is_cut(args: Any) -> bool:
    return args.seq1f1b_slices not in (None, 1)


REFUSALS = (
    refuse("--mtp-use-repeated-layer with --num-experts", "multi_token", "remove one: losses of a router that runs "
           "several times for a token would be counted as often", lambda a: a.mtp_use_repeated_layer and a.num_experts),
    refuse("--moe-use-upcycling", "multi_token", "remove it: Megatron upcycles the model's own layers alone"),
    refuse("--sequence-parallel of local layers", "multi_token", "remove it, or use --transformer-impl "
           "transformer_engine: Megatron gives these layers torch's norms, which do not work with it",
           lambda a: a.sequence_parallel and a.transformer_impl == "local"),
    refuse("--pipeline-model-parallel-layout", "multi_token", "use --decoder-last-pipeline-num-layers: the layers are "
           "those of the last stage"),
    refuse("--position-embedding-type learned_absolute in pipelines", "multi_token", "use rope: Megatron does not keep "
           "the last stage's copy of the positions equal to the first one's",
           lambda a: a.position_embedding_type == "learned_absolute" and a.pipeline_model_parallel_size > 1),
    refuse("--mtp-use-repeated-layer in slices", "multi_token", "remove one: keys of a layer that runs several times "
           "cannot be told apart", lambda a: a.mtp_use_repeated_layer and _is_cut(a)),
    refuse("--hdp-loader ray", "multi_token", "use --hdp-loader local: actors send the tokens of a rank alone",
           lambda a: a.hdp_loader == "ray"),
    refuse("--sculpt-windows", "multi_token", "train on documents"),
    refuse("--seq1f1b-zero-bubble", "multi_token", "remove it: backward passes of these layers are not split"),
    refuse("--state-policy", "multi_token", "leave it out: pages are planned without these layers",
           lambda a: a.state_policy != "resident"),
    refuse("--ngram-layers", "multi_token", "remove one of them"),
)  # fmt: skip

MULTI_TOKEN = Feature(
    name="multi_token",
    flag="--mtp-num-layers",
    summary="multi-token prediction over documents: layers that guess tokens further ahead",
    add_arguments=add_arguments,
    is_on=lambda args: bool(args.hybrid_data_parallel and args.mtp_num_layers),
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
