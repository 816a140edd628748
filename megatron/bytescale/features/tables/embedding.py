"""The embedding of a huge vocabulary in host memory, with the cache of n-gram memory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bytescale_ext.config.memory.host_tables import EmbeddingConfig, check_host_room
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import equals, given
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

FLAG = "--embedding-storage"


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(HostMemory):
    """Flags of the embedding in host memory; ``cache`` groups them."""

    embedding_cache_rows: float
    embedding_cache_policy: str
    embedding_staleness_read: int
    embedding_staleness_write: int
    embedding_staleness_warmup: int
    embedding_lr: float

    def cache(self) -> CacheFlags:
        """Return the flags of the cache."""
        return CacheFlags(
            "embedding",
            self.embedding_cache_rows,
            self.embedding_cache_policy,
            self.embedding_staleness_read,
            self.embedding_staleness_write,
            self.embedding_staleness_warmup,
            self.embedding_lr,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the embedding."""
    group = parser.add_argument_group("bytescale: embedding of the vocabulary")
    group.add_argument(
        FLAG,
        choices=STORAGE,
        default=STORAGE[0],
        help="Where the embedding of the vocabulary is. device (default): Megatron's. host: in host memory, shared out "
        "over the HDP ranks, with row-wise Adagrad beside it, and each rank keeps a cache of rows; for vocabularies of "
        "which a step reads a small part. Needs --untie-embeddings-and-output-weights.",
    )
    add_cache_arguments(group, "embedding", rate=0.01)


def resolve(options: EmbeddingOptions, run: RunConfig) -> EmbeddingConfig:
    """Return the table. Raises ValueError for values out of range, and where host memory is too small."""
    num_rows, dim = run.shape.vocab, run.shape.hidden
    host = options.cache().settings(num_rows)
    needed = host.num_bytes(num_rows, dim, run.cluster.num_ranks)
    advice = "lower --embedding-cache-rows, or use more ranks"
    check_host_room("the embedding and its cache", needed, free_bytes_of_process(options), advice)
    return EmbeddingConfig(host, num_rows, dim)


def build(training: Training, runtime: Runtime) -> Training:
    """Take the embedding out of the model."""
    from megatron.training.utils import print_rank_0

    from megatron.bytescale.core.models.common.embeddings.host_embedding import (
        HostEmbedding,
        put_on_host,
        token_rows_of,
    )
    from megatron.bytescale.features.tables.build import keep_tables

    config = runtime.run.get(EmbeddingConfig)
    num_bytes = config.host.num_bytes(config.num_rows, config.dim, runtime.run.cluster.num_ranks)
    print_rank_0(
        f"> bytescale: the embedding of {config.num_rows:,} token ids is in host memory, {num_bytes:,} bytes on a rank"
    )
    training.model.pre_wrap_hooks.append(partial(put_on_host, config.host))
    return keep_tables(training, runtime, HostEmbedding, token_rows_of)


REFUSALS = (
    refuse("tied embeddings", "embedding", "add --untie-embeddings-and-output-weights: the output layer needs all rows",
           ~given("untie_embeddings_and_output_weights")),
    refuse("--mtp-num-layers", "embedding", "remove it: its layers share the embedding"),
    refuse("--draft-heads", "embedding", "train heads of models whose embedding is on the device"),
    refuse("--memory-plan", "embedding", "remove it: the plan was recorded with another embedding"),
    refuse("--record-memory-plan", "embedding", "remove it: the plan has no place for the rows of a step"),
    *refusals_of_tables("embedding", FLAG, equals("embedding_storage", "host")),
)  # fmt: skip

EMBEDDING = Feature(
    name="embedding",
    flag=FLAG,
    summary="the embedding of a huge vocabulary in host memory (HET)",
    add_arguments=add_arguments,
    is_on=equals("embedding_storage", "host"),
    options=EmbeddingOptions,
    resolve=resolve,
    build=build,
    needs=f"{FLAG} host",
    requires=("hdp",),
    refusals=REFUSALS,
)
