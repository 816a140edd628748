"""N-gram memory: hashes of the last tokens select table rows, which a gate adds to the residual stream.

Engram (Cheng et al. 2026) puts such a memory before some layers. Here it is a child of Megatron's layer and runs in a
hook before the layer's forward, so that recomputation and activation policies treat it as part of the layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from bytescale_ext.config.memory.tables import NgramConfig
from bytescale_ext.states.rows import RowTable
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.transformer_block import TransformerBlock

NAME = "ngram_memory"


class NgramMemory(torch.nn.Module):
    """The memory of one layer: a table, and projections of its rows to keys and values.

    Every tensor-parallel rank holds the whole memory. Its output is zero at initialization, because ``value`` is 0, so
    it can be added to a trained model.

    Attributes:
        table: parameter [rows, dim].
        key: projection [hidden, columns * dim] to keys; keys and hidden state together open the gate.
        value: projection [hidden, columns * dim] to values.
        fingerprint: digest of the hash settings, int64 [1]; a checkpoint trained with other hashes is refused.
    """

    fingerprint: torch.Tensor

    def __init__(self, config: TransformerConfig, settings: NgramConfig, layer_number: int) -> None:
        super().__init__()
        self.config, self.settings, self.layer_number = config, settings, layer_number
        self.draw_seed = (settings.seed << 16) + layer_number
        width = settings.rule.num_columns * settings.dim
        keys = torch.randn(config.hidden_size, width, generator=torch.Generator().manual_seed(self.draw_seed))
        self.make_table()
        self.key = self._parameter(config.init_method_std * keys)
        self.value = self._parameter(torch.zeros(config.hidden_size, width))
        self.register_buffer("fingerprint", torch.tensor([settings.rule.fingerprint]))

    def make_table(self) -> None:
        """Initialize the table as a parameter."""
        self.table = self._parameter(torch.from_numpy(self.drawn_rows(range(self.settings.rule.num_rows)).values))

    def drawn_rows(self, rows: range) -> RowTable:
        """Return the initial values of rows."""
        return RowTable.random(rows, self.settings.dim, self.config.init_method_std, self.draw_seed)

    def values_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [t, columns, dim] of rows [t, columns]."""
        return functional.embedding(rows, self.table)

    def _parameter(self, values: torch.Tensor) -> torch.nn.Parameter:
        """Return values of any shape as a parameter; each tensor-parallel rank computes its own rows' gradient."""
        parameter = torch.nn.Parameter(values.to(torch.cuda.current_device(), self.config.params_dtype))
        parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states [t, 1, h] plus the memory's output; under sequence parallelism [t / ranks, 1, h].

        ``rows``: rows of all tokens of the micro-batch or slice, int64 [t, columns]; None if all of it is padding.
        """
        if rows is None:
            rows = torch.zeros(hidden.shape[0], self.settings.rule.num_columns, dtype=torch.int64, device=hidden.device)
        elif self.config.sequence_parallel:
            num_ranks = parallel_state.get_tensor_model_parallel_world_size()
            rows = rows.chunk(num_ranks)[parallel_state.get_tensor_model_parallel_rank()]
        grams = self.values_of(rows).flatten(1)
        key, value = (functional.linear(grams, weight)[:, None] for weight in (self.key, self.value))
        scores = (_normed(hidden) * _normed(key)).sum(-1, keepdim=True) / math.sqrt(hidden.shape[-1])
        return hidden + torch.sigmoid(scores) * value

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Return the entries of a sharded checkpoint.

        If Megatron saves each parameter of all layers as one tensor, each parameter of all memories is one tensor, too.
        """
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            self.place_among_layers() if sharded_offsets else (),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=None if metadata is None else metadata["dp_cp_group"],
        )
        return sharded

    def place_among_layers(self) -> tuple[tuple[int, int, int], ...]:
        """Return (axis, index, count) of this layer among the layers with a memory."""
        layers = self.settings.layers
        return ((0, layers.index(self.layer_number), len(layers)),)

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *others: object) -> None:
        """Load as torch does. Raises ValueError for rows that were trained with other hashes."""
        saved = state_dict.get(f"{prefix}fingerprint")
        if saved is not None and int(saved) != self.settings.rule.fingerprint:
            raise ValueError(
                f"--load: the n-gram memory of layer {self.layer_number} was trained with other --ngram-orders, "
                "--ngram-heads or --ngram-rows: give the values of that training"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


def _normed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [..., h] scaled to a mean square of 1 over its last dim."""
    return functional.rms_norm(tensor, tensor.shape[-1:])


def add_memories(
    settings: NgramConfig, make: type[NgramMemory], model_chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: give each layer in ``settings`` a memory of class ``make``."""
    for chunk in model_chunks:
        decoder: TransformerBlock = chunk.decoder
        for layer in decoder.layers:
            if layer.layer_number in settings.layers:
                layer.add_module(NAME, make(decoder.config, settings, layer.layer_number))
                layer.register_forward_pre_hook(add_memory, with_kwargs=True)
    return model_chunks


def add_memory(
    layer: torch.nn.Module, inputs: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Add the memory's output to the hidden states in the arguments of a layer."""
    params = kwargs["packed_seq_params"]
    assert isinstance(params, DocumentSeqParams), f"{params=}"
    memory = layer.get_submodule(NAME)
    return inputs, {**kwargs, "hidden_states": memory(kwargs["hidden_states"], params.gram_rows)}
