"""Keys and values, or latents, of earlier tokens, and the attention of Megatron's layers over them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from bytescale_ext.decode.attention import CachedLayer, cached_attention
from bytescale_ext.decode.latent import latent_attention
from bytescale_ext.parallel.upload import upload
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
from megatron.bytescale.core.transformer.multi_latent_attention import (
    DocumentLatentAttention,
    DocumentLatentCore,
    expansion_of,
)
from megatron.bytescale.core.transformer.spec_utils import layers_of

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron.bytescale.runtime import Runtime


@dataclass
class KeyValueCache:
    """The keys and values, or the latents, of one sequence in all layers.

    Attributes:
        capacity: maximum number of tokens.
        length: number of accepted tokens; later rows are from the last forward pass.
        layers: attention module of a layer -> its keys and its values, each [capacity, kv_heads, dim], or its latents,
            [capacity, numbers].
    """

    capacity: int
    length: int = 0
    layers: dict[object, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def append(self, owner: object, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Append a layer's tensors [t, ...] of new tokens; return the tensors of all tokens, [length + t, ...]."""
        if owner not in self.layers:
            self.layers[owner] = tuple(tensor.new_empty(self.capacity, *tensor.shape[1:]) for tensor in new)
        stop = self.length + new[0].shape[0]
        assert stop <= self.capacity, f"{stop=} {self.capacity=}"
        for rows, tensor in zip(self.layers[owner], new, strict=True):
            rows[self.length : stop] = tensor
        return tuple(rows[:stop] for rows in self.layers[owner])

    def keep(self, rows: Sequence[int]) -> None:
        """Accept these rows of the last forward pass, in this order, and drop the others."""
        if list(rows) != list(range(len(rows))):
            tensors = [tensor for of_layer in self.layers.values() for tensor in of_layer]
            index = upload(torch.tensor(rows) + self.length, tensors[0].device)
            for tensor in tensors:
                tensor[self.length : self.length + len(rows)] = tensor[index]
        self.length += len(rows)


@dataclass(frozen=True)
class NewTokens:
    """The rows of one sequence in a forward pass.

    Attributes:
        cache: cache of the sequence.
        count: number of rows.
        visible: new tokens that each new token attends to, bool [t, t]; None: itself and earlier tokens.
    """

    cache: KeyValueCache
    count: int
    visible: torch.Tensor | None = None


@dataclass
class DecodeParams(DocumentSeqParams):
    """The input of attention in a forward pass. ``parts``: the sequences, with their rows one after another."""

    parts: Sequence[NewTokens] = ()


class CachedAttention(DocumentAttention):
    """Attention of each sequence's new tokens over its cache and over each other."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: DocumentSeqParams | None = None,
    ) -> torch.Tensor:
        """Map query [t, 1, heads, dim] and key, value [t, 1, kv_heads, dim] to [t, 1, heads * dim]."""
        parts = parts_of(packed_seq_params)
        of_parts = zip(parts, *(tensor[:, 0].split(counts_of(parts)) for tensor in (query, key, value)), strict=True)
        layer, outputs = cached_layer(self), []
        for part, q, k, v in of_parts:
            keys, values = part.cache.append(self, k, v)
            outputs.append(cached_attention(q, keys, values, part.visible, layer))
        return torch.cat(outputs).flatten(1)[:, None]


class CachedLatentCore(DocumentLatentCore):
    """The core of latent attention, over the cache of each sequence.

    If the layer gives latents, the cache holds latents. Otherwise it holds keys and values, which may differ in width.
    """

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        packed_seq_params: DocumentSeqParams,
        **__: object,
    ) -> torch.Tensor:
        """Map query, key [t, heads, dim] and value [t, heads, value_dim] to [t, 1, heads * value_dim].

        With latents, ``key`` and ``value`` are as in ``DocumentLatentCore.forward``.
        """
        parts = parts_of(packed_seq_params)
        counts, layer = counts_of(parts), cached_layer(self)
        queries, outputs = query.split(counts), []
        if key.dim() == 2:
            expansion = expansion_of(query, key, value)
            for part, q, new in zip(parts, queries, key.split(counts), strict=True):
                (latents,) = part.cache.append(self, new)
                outputs.append(latent_attention(q, latents, part.visible, layer, expansion))
        else:
            for part, q, k, v in zip(parts, queries, key.split(counts), value.split(counts), strict=True):
                keys, values = part.cache.append(self, k, v)
                outputs.append(cached_attention(q, keys, values, part.visible, layer))
        return torch.cat(outputs).flatten(1)[:, None]


def parts_of(params: DocumentSeqParams | None) -> Sequence[NewTokens]:
    """Return the sequences of a forward pass."""
    assert isinstance(params, DecodeParams) and params.parts, f"{params=}"
    return params.parts


def counts_of(parts: Sequence[NewTokens]) -> list[int]:
    """Return the number of rows of each sequence."""
    return [part.count for part in parts]


def cached_layer(attention: DocumentAttention) -> CachedLayer:
    """Return the settings of a layer's attention."""
    kernel = attention.runtime.parts.kernel
    assert kernel is not None, "the build of the model chooses the kernel"
    return CachedLayer(kernel, attention.scale, attention.window, attention.softmax_offset)


def with_cached_attention(
    spec: ModuleSpec | TransformerBlockSubmodules, runtime: Runtime
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return a copy of a layer's or block's spec of documents, with attention over a cache."""
    spec = copy.deepcopy(spec)
    for layer in layers_of(spec):
        attention: ModuleSpec = layer.submodules.self_attention
        if attention.module is DocumentLatentAttention:  # it builds its own core
            attention.params = {**attention.params, "core": CachedLatentCore}
        else:
            attention.submodules.core_attention = partial(CachedAttention, runtime=runtime)
    return spec
