"""The vocabulary embedding in host memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from bytescale_ext.config.memory.tables import HostTables
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.states.rows import RowTable
from megatron.bytescale.core.models.common.embeddings.host_table import HostTable

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.transformer_config import TransformerConfig


class HostEmbedding(torch.nn.Module):
    """Replaces Megatron's ``word_embeddings``, with the same initial values.

    Attributes:
        host: table with one row per token id.
    """

    def __init__(self, embedding: LanguageModelEmbedding, settings: HostTables) -> None:
        """Copy the values of an embedding. Collective on the tensor-parallel group."""
        super().__init__()
        self.config: TransformerConfig = embedding.config
        self._rows_first = embedding.reduce_scatter_embeddings  # Megatron's order of dims in this case: [s, b, h]
        weight = embedding.word_embeddings.weight.detach()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(weight) for _ in range(group.size())]
        torch.distributed.all_gather(parts, weight.contiguous(), group=group)
        values = torch.cat(parts).float().cpu().numpy()
        self.host = HostTable(settings, len(values), partial(rows_of_table, values), weight.device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids [b, s]: [s, b, h] or [b, s, h], as Megatron's embedding does.

        Under sequence parallelism the result is this rank's part: [s / ranks, b, h].
        """
        if self._rows_first:
            token_ids = token_ids.transpose(0, 1)
        if self._rows_first and self.config.sequence_parallel:
            num_ranks = parallel_state.get_tensor_model_parallel_world_size()
            token_ids = token_ids.chunk(num_ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return self.host.values_of(token_ids.contiguous()).to(self.config.params_dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Return the entries of a sharded checkpoint: this rank's rows. Collective."""
        return dict(self.host.sharded_entries(prefix))

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *others: object) -> None:
        """Load this rank's rows."""
        self.host.load(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


def rows_of_table(values: np.ndarray, rows: range) -> RowTable:
    """Return initial rows ``rows`` of ``values``, float32 [n, dim]; rows from n on are zeros."""
    own = np.zeros((len(rows), values.shape[1]), np.float32)
    given = values[rows.start : rows.stop]
    own[: len(given)] = given
    return RowTable(own, np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int64))


def put_on_host(settings: HostTables, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: move the vocabulary embedding to host memory."""
    for chunk in model_chunks:
        embedding: LanguageModelEmbedding | None = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.word_embeddings = HostEmbedding(embedding, settings)
    return model_chunks


def token_rows_of(step: StepBatch) -> np.ndarray:
    """Return the token ids int64 [n] that this rank reads in a step, ascending and with the padding id."""
    return np.unique(np.concatenate([np.zeros(1, np.int64), *(unit.tokens.numpy() for unit in step.micro_batches)]))
