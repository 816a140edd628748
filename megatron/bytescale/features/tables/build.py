"""Tables in training. Tables in host memory are read when a step begins, and receive gradients when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.training.utils import print_rank_0

from bytescale_ext.config.memory.tables import EmbeddingConfig, NgramConfig, TablesConfig
from bytescale_ext.data.loading.step import StepBatch
from megatron.bytescale.core.models.common.embeddings.host_embedding import HostEmbedding, put_on_host, token_rows_of
from megatron.bytescale.core.models.common.embeddings.host_memory import HostNgramMemory, gram_rows_of
from megatron.bytescale.core.models.common.embeddings.host_table import TablesOfStep
from megatron.bytescale.core.models.common.embeddings.ngram_memory import NgramMemory, add_memories
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.stock import ForwardStep, LossFunction


def add_tables(training: Training, runtime: Runtime) -> Training:
    """Add n-gram memories to the model, and replace its embedding."""
    tables = runtime.run.get(TablesConfig)
    rows_of: dict[type[torch.nn.Module], Callable[[StepBatch], np.ndarray]] = {}
    if tables.ngram is not None:
        _add_ngram_memories(tables.ngram, training, runtime)
        if tables.ngram.host is not None:
            rows_of[HostNgramMemory] = gram_rows_of
    if tables.embedding is not None:
        _replace_embedding(tables.embedding, training, runtime)
        rows_of[HostEmbedding] = token_rows_of
    return _keep_tables(training, runtime, TablesOfStep(rows_of)) if rows_of else training


def _add_ngram_memories(config: NgramConfig, training: Training, runtime: Runtime) -> None:
    """Add the memories; the loader computes their rows."""
    hooks = training.model.pre_wrap_hooks
    number = config.num_parameters(runtime.run.shape.hidden)
    layers = ", ".join(map(str, config.layers))
    print_rank_0(f"> bytescale: n-gram memory of {number:,} parameters in each of the layers {layers}")
    if config.host is None:
        hooks.append(partial(add_memories, config, NgramMemory))
        return
    num_bytes = config.host.num_bytes(config.rule.num_rows, config.dim, runtime.run.cluster.num_ranks)
    print_rank_0(f"> bytescale: their tables and caches take {num_bytes:,} bytes of host memory each on a rank")
    hooks.append(partial(add_memories, config, HostNgramMemory))


def _replace_embedding(config: EmbeddingConfig, training: Training, runtime: Runtime) -> None:
    """Move the vocabulary embedding to host memory."""
    num_bytes = config.host.num_bytes(config.num_rows, config.dim, runtime.run.cluster.num_ranks)
    print_rank_0(
        f"> bytescale: the embedding of {config.num_rows:,} token ids is in host memory, {num_bytes:,} bytes on a rank"
    )
    training.model.pre_wrap_hooks.append(partial(put_on_host, config.host))


def _keep_tables(training: Training, runtime: Runtime, tables: TablesOfStep) -> Training:
    """Read the tables when a step begins, and update them when it ends."""
    training.model.pre_wrap_hooks.append(tables.collect)

    def read_rows_first(forward: ForwardStep) -> ForwardStep:
        def read_and_forward(
            data_iterator: Iterator[object], model: torch.nn.Module
        ) -> tuple[torch.Tensor, LossFunction]:
            assert runtime.step.batch is not None
            tables.begin(runtime.step.batch, model.training, runtime.step.next_batch)
            return forward(data_iterator, model)

        return read_and_forward

    def send_rows_last(finalize: Callable[..., object]) -> Callable[..., object]:
        def finalize_and_send(
            model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, *args: object, **kwargs: object
        ) -> None:
            finalize(model, num_tokens, *args, **kwargs)  # sums the labels of all ranks in num_tokens
            assert num_tokens is not None, "losses are summed over tokens"
            runtime.log.totals.figures += tables.end(num_tokens)

        return finalize_and_send

    return training.wrap_forward_step(read_rows_first).wrap_finalize(send_rows_last)
