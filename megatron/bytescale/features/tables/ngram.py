"""N-gram memory (Engram, Cheng et al. 2026): tables of embeddings of the last tokens, added before some layers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from bytescale_ext.config.memory.host_tables import check_host_room
from bytescale_ext.config.memory.ngram import NgramConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.samples.grams import GramRule, numbers
from megatron.bytescale.arguments.conditions import chosen, equals
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.tables.flags import (
    STORAGE,
    CacheFlags,
    HostMemory,
    add_cache_arguments,
    free_bytes_of_process,
    refusals_of_tables,
)

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


@dataclass(frozen=True, kw_only=True)
class NgramOptions(HostMemory):
    """Flags of n-gram memory; ``cache`` groups those of tables in host memory.

    Attributes:
        ngram_layers: layers with a memory, numbered from 1.
        ngram_orders: lengths of n-grams in tokens.
        ngram_heads: rows of each n-gram.
        ngram_rows: rows of each table.
        ngram_dim: numbers of a row.
        ngram_storage: where tables are.
        num_layers: layers of the model.
        seq_length: most tokens of a sample.
        seed: seed of the run.
    """

    ngram_layers: tuple[int, ...]
    ngram_orders: tuple[int, ...]
    ngram_heads: int
    ngram_rows: int
    ngram_dim: int
    ngram_storage: str
    ngram_cache_rows: float
    ngram_cache_policy: str
    ngram_staleness_read: int
    ngram_staleness_write: int
    ngram_staleness_warmup: int
    ngram_lr: float
    num_layers: int
    seq_length: int
    seed: int

    def cache(self) -> CacheFlags:
        """Return the flags of the cache."""
        return CacheFlags(
            "ngram",
            self.ngram_cache_rows,
            self.ngram_cache_policy,
            self.ngram_staleness_read,
            self.ngram_staleness_write,
            self.ngram_staleness_warmup,
            self.ngram_lr,
        )


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


def before_checks(options: NgramOptions) -> Overrides:
    """Raise ValueError for flags of tables in host memory if tables are on the device."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cache_arguments(parser.add_argument_group(), "ngram", rate=0.01)
    for action in parser._actions:
        if options.ngram_storage == "device" and getattr(options, action.dest) != action.default:
            raise ValueError(f"{action.option_strings[0]} needs --ngram-storage host")
    return NO_OVERRIDES


def resolve(options: NgramOptions, run: RunConfig) -> NgramConfig:
    """Return the tables. Raises ValueError for layers that do not exist, and sizes out of range."""
    sizes = {"heads": options.ngram_heads, "rows": options.ngram_rows, "dim": options.ngram_dim}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--ngram-{name} {size} must be at least 1")
    layers, orders = options.ngram_layers, options.ngram_orders
    if layers[-1] > options.num_layers:
        raise ValueError(f"--ngram-layers {layers[-1]}: the model has layers 1 to {options.num_layers}")
    if orders[-1] > options.seq_length:
        raise ValueError(f"--ngram-orders {orders[-1]}: no sample is longer than --seq-length {options.seq_length}")
    rule = GramRule(orders, options.ngram_heads, options.ngram_rows)
    config = NgramConfig(layers, rule, options.ngram_dim, options.seed)
    if options.ngram_storage == "device":
        return config
    host = options.cache().settings(rule.num_rows)
    most_of_a_stage = min(len(layers), max(run.stage_layers))
    needed = most_of_a_stage * host.num_bytes(rule.num_rows, options.ngram_dim, run.cluster.num_ranks)
    advice = "lower --ngram-rows, --ngram-dim or --ngram-cache-rows, or use more ranks"
    check_host_room("n-gram tables and their caches", needed, free_bytes_of_process(options), advice)
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
           equals("hdp_loader", "ray")),
    refuse("--sculpt-attention window", "ngram", "add --sculpt-attention document: n-grams never cross documents",
           chosen("sculpt_windows") & ~equals("sculpt_attention", "document")),
    refuse("--draft-heads", "ngram", "train heads of models without a memory"),
    refuse("--memory-plan", "ngram", _NOT_PLANNED),
    refuse("--record-memory-plan", "ngram", _NOT_PLANNED),
    *refusals_of_tables("ngram", "--ngram-storage", equals("ngram_storage", "host")),
)  # fmt: skip

NGRAM = Feature(
    name="ngram",
    flag="--ngram-layers",
    summary="n-gram memory: tables of embeddings of the last tokens, before some layers",
    add_arguments=add_arguments,
    is_on=chosen("ngram_layers"),
    options=NgramOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    requires=("hdp",),
    refusals=REFUSALS,
)
