"""Latents in place of keys and values (DeepSeek-V2, section 2.1): what multi-latent attention sends, holds and expands.

Keys and values of all heads are one matrix product of a token's latent vector; a part of the key with positions, which
all heads share, is held beside it. Latents therefore take the place of keys and values in rings and slices: the two
halves of ``(latent, part with positions)`` are a "key" and a "value" of one head. Each block expands the rows that
it takes, in the backward pass once more; gradients of its keys and values become those of latents and of the weight::

    (content, value) = latent W        key = (content, part with positions)
    d latent = (d content, d value) W'        d W = latent' (d content, d value), summed over blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from bytescale_ext.attention.kernels.contract import accumulation_dtype

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Expansion:
    """How keys and values are made of latents.

    Attributes:
        weight: of the up-projection, ``[heads * (content_dim + value_dim), key_rank]``, head by head, contents first.
            Not a view of a parameter but the parameter: its storage may change between the passes.
        sizes: ``content_dim``, the numbers of a key's head without positions, and ``value_dim``.
        position_dim: numbers of a key with positions.
        gradient: sum of the gradients of the weight, in its accumulation dtype and shape; None: not in a backward pass.
    """

    weight: torch.Tensor
    sizes: tuple[int, int]
    position_dim: int
    gradient: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """The size of all heads: the narrower ones of keys and values end in zeros, which change nothing."""
        return max(self.sizes[0] + self.position_dim, self.sizes[1])

    def with_gradient(self) -> Expansion:
        """Return the same for one backward pass, with a gradient of zeros."""
        zeros = torch.zeros_like(self.weight, dtype=accumulation_dtype(self.weight.dtype))
        return replace(self, gradient=zeros)

    def expand(self, k: torch.Tensor, v: torch.Tensor) -> KeysAndValues:
        """Return keys and values ``[rows, heads, width]`` of the halves ``k, v [rows, 1, half]``."""
        latents, with_positions = self._parts(k, v)
        expanded = (latents @ self.weight.t()).unflatten(1, (-1, sum(self.sizes)))
        contents, values = expanded.split(self.sizes, dim=2)
        shared = with_positions[:, None].expand(-1, contents.shape[1], -1)
        keys = torch.cat((contents, shared), dim=2)
        return self._filled(keys), self._filled(values)

    def collapse(self, halves: KeysAndValues, grads: KeysAndValues) -> KeysAndValues:
        """Return the gradients of halves ``[rows, 1, half]`` and add that of the weight to ``gradient``.

        ``grads``: of keys and values, ``[rows, heads, width]`` each.
        """
        assert self.gradient is not None, "with_gradient makes room for it"
        latents, _ = self._parts(*halves)
        content_dim, value_dim = self.sizes
        of_keys, of_values = grads[0][..., : content_dim + self.position_dim], grads[1][..., :value_dim]
        expanded = torch.cat((of_keys[..., :content_dim], of_values), dim=2).flatten(1)
        self.gradient.add_(expanded.t() @ latents)
        of_latents = torch.cat((expanded @ self.weight, of_keys[..., content_dim:].sum(1)), dim=1)
        return latent_halves(of_latents)

    def check(self, tensors: Sequence[torch.Tensor], num_rows: int) -> None:
        """Raise ValueError unless ``q [num_rows, heads, width]`` and halves ``k, v [num_rows, 1, half]`` fit."""
        heads = self.weight.shape[0] // sum(self.sizes)
        half = -(-(self.weight.shape[1] + self.position_dim) // 2)
        wanted = [(num_rows, heads, self.width), *2 * [(num_rows, 1, half)]]
        got = [tuple(tensor.shape) for tensor in tensors]
        if got != wanted or len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = ", ".join(str(tensor.dtype) for tensor in tensors)
            raise ValueError(f"attention over latents needs q, k, v {wanted} and one dtype; got {got}, {dtypes}")

    def _parts(self, k: torch.Tensor, v: torch.Tensor) -> KeysAndValues:
        """Return latents ``[rows, key_rank]`` and parts with positions ``[rows, position_dim]`` of two halves."""
        rank = self.weight.shape[1]
        both = torch.cat((k[:, 0], v[:, 0]), dim=1)
        return both[:, :rank], both[:, rank : rank + self.position_dim]

    def _filled(self, heads: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, heads, dim]`` with zeros up to ``width``."""
        return pad(heads, (0, self.width - heads.shape[2]))


def latent_halves(latents: torch.Tensor) -> KeysAndValues:
    """Return the halves ``[rows, 1, half]`` of latents with their parts with positions ``[rows, numbers]``.

    An odd number is filled up with a zero. Differentiable.
    """
    first, second = pad(latents, (0, latents.shape[1] % 2)).unsqueeze(1).chunk(2, dim=2)
    return first.contiguous(), second.contiguous()
