"""N-gram memory (Engram, Cheng et al. 2026): tables of embeddings of the last tokens, added before some layers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.memory.host_tables import check_fits
from bytescale_ext.config.memory.ngram import NgramConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.samples.grams import GramRule, numbers
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.tables.flags import (
    STORAGE,
    add_cache_arguments,
    cache_settings,
    free_bytes_of_process,
    refusals_of_tables,
)

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of n-gram memory."""
    group = parser.add_argument_group("bytescale: n-gram memory")
    group.add_argument(
        "--ngram-layers",
        type=numbers,
        metavar="N,N",
        help="Give these layers, numbered from 1, a memory of n-grams: hashes of the last tokens of a document name "
        "rows of a table, which are added to the layer's input behind a gate. n-grams never cross documents. Each "
        "layer has its own table. Needs --hybrid-data-parallel. `bytescale ngram` counts the "
        "rows that a data set touches.",
    )
    group.add_argument(
        "--ngram-orders", type=numbers, default=(2, 3), metavar="N,N", help="Lengths of n-grams in tokens (2,3)."
    )
    group.add_argument("--ngram-heads", type=int, default=4, metavar="N", help="Rows of each n-gram (4).")
    group.add_argument("--ngram-rows", type=int, default=1 << 20, metavar="N", help="Rows of each table (1048576).")
    group.add_argument("--ngram-dim", type=int, default=64, metavar="N", help="Numbers of a row (64).")
    group.add_argument(
        "--ngram-storage",
        choices=STORAGE,
        default=STORAGE[0],
        help="Where tables are. device (default): each is a parameter like others, on every rank. host: in host "
        "memory, shared out over the HDP ranks, with row-wise Adagrad beside it, and each rank keeps a cache of rows.",
    )
    add_cache_arguments(group, "ngram", rate=0.01)


def before_checks(args: Any) -> None:
    """Raise ValueError for flags of tables in host memory where tables are on the device."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cache_arguments(parser.add_argument_group(), "ngram", rate=0.01)
    for action in parser._actions:
        if args.ngram_storage == "device" and getattr(args, action.dest) != action.default:
            raise ValueError(f"{action.option_strings[0]} needs --ngram-storage host")


def resolve(args: Any, run: RunConfig) -> NgramConfig:
    """Return the tables. Raises ValueError for layers that do not exist, and sizes out of range."""
    for name in ("heads", "rows", "dim"):
        if getattr(args, f"ngram_{name}") < 1:
            raise ValueError(f"--ngram-{name} {getattr(args, f'ngram_{name}')} must be at least 1")
    if args.ngram_layers[-1] > args.num_layers:
        raise ValueError(f"--ngram-layers {args.ngram_layers[-1]}: the model has layers 1 to {args.num_layers}")
    if args.ngram_orders[-1] > args.seq_length:
        raise ValueError(
            f"--ngram-orders {args.ngram_orders[-1]}: no sample is longer than --seq-length {args.seq_length}"
        )
    rule = GramRule(args.ngram_orders, args.ngram_heads, args.ngram_rows)
    config = NgramConfig(args.ngram_layers, rule, args.ngram_dim, args.seed)
    if args.ngram_storage == "device":
        return config
    host = cache_settings(args, "ngram", rule.num_rows)
    most_of_a_stage = min(len(args.ngram_layers), max(run.stage_layers))
    needed = most_of_a_stage * host.num_bytes(rule.num_rows, args.ngram_dim, run.cluster.num_ranks)
    advice = "lower --ngram-rows, --ngram-dim or --ngram-cache-rows, or use more ranks"
    check_fits("n-gram tables and their caches", needed, free_bytes_of_process(args), advice)
    return replace(config, host=host)


def build(training: Training, runtime: Runtime) -> Training:
    """Add the memories to the model; the loader makes their rows (``training/hdp.py``)."""
    from megatron.training.utils import print_rank_0

    from megatron.bytescale.core.models.common.embeddings.ngram_memory import NgramMemory, add_memories

    config, hooks = runtime.run.get(NgramConfig), training.model.pre_wrap_hooks
    number = config.num_parameters(runtime.run.shape.hidden)
    layers = ", ".join(map(str, config.layers))
    print_rank_0(f"> bytescale: n-gram memory of {number:,} parameters in each of the layers {layers}")
    if config.host is None:
        hooks.append(partial(add_memories, config, NgramMemory))
        return training
    from megatron.bytescale.core.models.common.embeddings.host_memory import HostNgramMemory, gram_rows_of
    from megatron.bytescale.features.tables.build import keep_tables

    num_bytes = config.host.num_bytes(config.rule.num_rows, config.dim, runtime.run.cluster.num_ranks)
    print_rank_0(f"> bytescale: their tables and caches take {num_bytes:,} bytes of host memory each on a rank")
    hooks.append(partial(add_memories, config, HostNgramMemory))
    return keep_tables(training, runtime, HostNgramMemory, gram_rows_of)


_NOT_PLANNED = "remove it: the plan has no place for the memory's tensors"
REFUSALS = (
    refuse("--hdp-loader ray", "ngram", "use --hdp-loader local, which reads the tokens before a shard",
           lambda a: a.hdp_loader == "ray"),
    refuse("--sculpt-attention window", "ngram", "add --sculpt-attention document: n-grams never cross documents",
           lambda a: a.sculpt_windows is not None and a.sculpt_attention != "document"),
    refuse("--draft-heads", "ngram", "train heads of models without a memory"),
    refuse("--memory-plan", "ngram", _NOT_PLANNED),
    refuse("--record-memory-plan", "ngram", _NOT_PLANNED),
    *refusals_of_tables("ngram", "--ngram-storage", lambda a: a.ngram_storage == "host"),
)  # fmt: skip

NGRAM = Feature(
    name="ngram",
    flag="--ngram-layers",
    summary="n-gram memory: tables of embeddings of the last tokens, before some layers",
    add_arguments=add_arguments,
    is_on=lambda args: args.ngram_layers is not None,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    requires=("hdp",),
    refusals=REFUSALS,
)
