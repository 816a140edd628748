"""Keys and values of earlier tokens, and the attention of Megatron's layers over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bytescale_ext.decode.attention import CachedLayer, cached_attention
from bytescale_ext.parallel.upload import upload
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention


@dataclass
class KeyValueCache:
    """The keys and values of one sequence in all layers.

    Attributes:
        capacity: maximum number of tokens.
        length: number of accepted tokens; later rows are from the last forward pass.
        layers: attention module of a layer -> its keys and values, [2, capacity, kv_heads, dim].
    """

    capacity: int
    length: int = 0
    layers: dict[object, torch.Tensor] = field(default_factory=dict)

    def append(self, owner: object, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [t, kv_heads, dim] of a layer's new tokens; return all of them, [length + t, ...]."""
        if owner not in self.layers:
            self.layers[owner] = k.new_empty(2, self.capacity, *k.shape[1:])
        both, stop = self.layers[owner], self.length + k.shape[0]
        assert stop <= self.capacity, f"{stop=} {self.capacity=}"
        both[0, self.length : stop], both[1, self.length : stop] = k, v
        return both[0, :stop], both[1, :stop]

    def keep(self, rows: Sequence[int]) -> None:
        """Accept these rows of the last forward pass, in this order, and drop the others."""
        if list(rows) != list(range(len(rows))):
            device = next(iter(self.layers.values())).device
            index = upload(torch.tensor(rows) + self.length, device)
            for both in self.layers.values():
                both[:, self.length : self.length + len(rows)] = both[:, index]
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
        params = packed_seq_params
        assert isinstance(params, DecodeParams) and params.parts, f"{params=}"
        counts = [part.count for part in params.parts]
        of_parts = zip(params.parts, *(tensor[:, 0].split(counts) for tensor in (query, key, value)), strict=True)
        outputs, kernel = [], self.runtime.parts.kernel
        assert kernel is not None, "the build of the model chooses the kernel"
        layer = CachedLayer(kernel, self.scale, self.window, self.softmax_offset)
        for part, q, k, v in of_parts:
            keys, values = part.cache.append(self, k, v)
            outputs.append(cached_attention(q, keys, values, part.visible, layer))
        return torch.cat(outputs).flatten(1)[:, None]
