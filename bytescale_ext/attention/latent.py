"""Latents in place of keys and values, which multi-latent attention sends and stores (DeepSeek-V2, section 2.1).

The keys and values of all heads are one matrix product of a token's latent vector. In addition, all heads share the
part of the key with positions. In rings and slices the vector ``(latent, part with positions)`` takes the place of keys
and values: its two halves are the "key" and the "value" of a single head. Each block expands the rows that it uses, and
expands them again in the backward pass. Gradients of keys and values become gradients of latents and of the weight::

    (content, value) = latent W        key = (content, part with positions)
    d latent = (d content, d value) W'        d W = latent' (d content, d value), summed over blocks

Keys and values whose heads have different widths also travel as two halves, without padding (``Halves``).
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
    """The up-projection from latents to keys and values.

    Attributes:
        weight: weight of the up-projection, ``[heads * (content_dim + value_dim), key_rank]``, head by head, contents
            first. It is the parameter itself, not a view, because its storage may change between the passes.
        sizes: ``(content_dim, value_dim)``, the sizes per head of the key's part without positions and of the value.
        position_dim: size of the key's part with positions.
        gradient: sum of the weight's gradients, in the accumulation dtype; None outside of a backward pass.
    """

    weight: torch.Tensor
    sizes: tuple[int, int]
    position_dim: int
    gradient: torch.Tensor | None = None

    @property
    def value_dim(self) -> int:
        """Width of one head of the values."""
        return self.sizes[1]

    def with_gradient(self) -> Expansion:
        """Return a copy for one backward pass, with a gradient of zeros."""
        zeros = torch.zeros_like(self.weight, dtype=accumulation_dtype(self.weight.dtype))
        return replace(self, gradient=zeros)

    def expand(self, k: torch.Tensor, v: torch.Tensor) -> KeysAndValues:
        """Return keys ``[rows, heads, dim]`` and values ``[rows, heads, value_dim]`` of ``k, v [rows, 1, half]``."""
        return self.expand_whole(torch.cat((k[:, 0], v[:, 0]), dim=1))

    def expand_whole(self, vectors: torch.Tensor) -> KeysAndValues:
        """Return keys and values as ``expand``, of vectors ``(latent, part with positions)``, ``[rows, numbers]``."""
        latents, with_positions = self._parts(vectors)
        expanded = (latents @ self.weight.t()).unflatten(1, (-1, sum(self.sizes)))
        contents, values = expanded.split(self.sizes, dim=2)
        shared = with_positions[:, None].expand(-1, contents.shape[1], -1)
        return torch.cat((contents, shared), dim=2), values

    def collapse(self, halves: KeysAndValues, grads: KeysAndValues) -> KeysAndValues:
        """Return the gradients of ``halves [rows, 1, half]``, and add the gradient of the weight to ``gradient``.

        ``grads``: gradients of keys and values, in the shapes that ``expand`` returns.
        """
        assert self.gradient is not None, "with_gradient makes room for the gradient"
        latents, _ = self._parts(torch.cat((halves[0][:, 0], halves[1][:, 0]), dim=1))
        content_dim, (dkeys, dvalues) = self.sizes[0], grads
        dexpanded = torch.cat((dkeys[..., :content_dim], dvalues), dim=2).flatten(1)
        self.gradient.add_(dexpanded.t() @ latents)
        dlatents = torch.cat((dexpanded @ self.weight, dkeys[..., content_dim:].sum(1)), dim=1)
        return latent_halves(dlatents)

    def check(self, tensors: Sequence[torch.Tensor], num_rows: int) -> None:
        """Raise ValueError unless ``q [num_rows, heads, dim]`` and halves ``k, v [num_rows, 1, half]`` fit."""
        heads = self.weight.shape[0] // sum(self.sizes)
        half = -(-(self.weight.shape[1] + self.position_dim) // 2)
        width = self.sizes[0] + self.position_dim
        _check(tensors, [(num_rows, heads, width), *2 * [(num_rows, 1, half)]], "latents")

    def _parts(self, vectors: torch.Tensor) -> KeysAndValues:
        """Return the latents ``[rows, key_rank]`` and the parts with positions ``[rows, position_dim]`` of vectors."""
        rank = self.weight.shape[1]
        return vectors[:, :rank], vectors[:, rank : rank + self.position_dim]


@dataclass(frozen=True)
class Halves:
    """Keys and values of different widths as two halves of equal width.

    Attributes:
        sizes: widths of one head of the keys and of the values.
        weight, gradient: None, because nothing is projected.
    """

    sizes: tuple[int, int]
    weight: None = None
    gradient: None = None

    @property
    def value_dim(self) -> int:
        """Width of one head of the values."""
        return self.sizes[1]

    def with_gradient(self) -> Halves:
        """Return itself, because a backward pass needs no memory."""
        return self

    def expand(self, k: torch.Tensor, v: torch.Tensor) -> KeysAndValues:
        """Return keys ``[rows, heads, dim]`` and values ``[rows, heads, value_dim]`` of ``[rows, heads, half]``."""
        both = torch.cat((k, v), dim=2)
        keys, values = both[..., : self.sizes[0]], both[..., self.sizes[0] : sum(self.sizes)]
        return keys.contiguous(), values.contiguous()

    def collapse(self, halves: KeysAndValues, grads: KeysAndValues) -> KeysAndValues:
        """Return the gradients of ``halves [rows, heads, half]``; ``grads``: in the shapes that ``expand`` returns."""
        return halves_of(torch.cat(grads, dim=2))

    def check(self, tensors: Sequence[torch.Tensor], num_rows: int) -> None:
        """Raise ValueError unless ``q [num_rows, heads, dim]`` and halves ``k, v [num_rows, kv_heads, half]`` fit."""
        heads, kv_heads, half = tensors[0].shape[1], tensors[1].shape[1], -(-sum(self.sizes) // 2)
        _check(tensors, [(num_rows, heads, self.sizes[0]), *2 * [(num_rows, kv_heads, half)]], "halves")
        if heads % kv_heads:
            raise ValueError(f"attention needs heads to be a multiple of kv_heads; got {heads} and {kv_heads}")


def _check(tensors: Sequence[torch.Tensor], expected: Sequence[tuple[int, ...]], kind: str) -> None:
    """Raise ValueError unless tensors [...] have the expected shapes and one dtype."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if shapes != expected or len({tensor.dtype for tensor in tensors}) > 1:
        dtypes = ", ".join(str(tensor.dtype) for tensor in tensors)
        raise ValueError(f"attention over {kind} needs q, k, v {expected} and one dtype; got {shapes}, {dtypes}")


def latent_halves(latents: torch.Tensor) -> KeysAndValues:
    """Split vectors ``(latent, part with positions)``, ``[rows, numbers]``, into two halves ``[rows, 1, half]``."""
    return halves_of(latents.unsqueeze(1))


def halves_of(both: torch.Tensor) -> KeysAndValues:
    """Split ``[rows, heads, numbers]`` into two halves ``[rows, heads, half]``. Differentiable.

    An odd number of numbers gets a zero.
    """
    if both.shape[2] % 2:
        both = pad(both, (0, 1))
    first, second = both.chunk(2, dim=2)
    return first.contiguous(), second.contiguous()
