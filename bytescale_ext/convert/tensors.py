"""Which tensors of a Hugging Face model make a tensor of Megatron's, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.convert.layout import Layout
from bytescale_ext.convert.products import join_qkv, split_qkv


@dataclass(frozen=True)
class Row:
    """One tensor of Megatron's.

    Attributes:
        name: in Megatron.
        parts: names of the tensors that it is made of, in Hugging Face's model.
        join: makes it of them.
        split: makes them of it.
    """

    name: str
    parts: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda whole: (whole,)


def rows(layout: Layout) -> Iterator[Row]:
    """Yield the tensors of a model, each of Megatron's once."""
    yield Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(layout.num_layers):
        yield from _rows_of_attention(layout, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        yield from _rows_of_mlp(layout, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield Row("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not layout.is_tied:
        yield Row("output_layer.weight", ("lm_head.weight",))


def _rows_of_attention(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    yield Row(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",))
    for kind in ("weight", "bias") if layout.qkv_bias else ("weight",):
        yield Row(
            f"{ours}self_attention.linear_qkv.{kind}",
            tuple(f"{theirs}self_attn.{one}_proj.{kind}" for one in "qkv"),
            lambda parts: join_qkv(parts, layout.num_groups, layout.head_dim),
            lambda whole: split_qkv(whole, layout.num_groups, layout.head_dim),
        )
    for one in "qk" if layout.qk_norm else "":
        yield Row(f"{ours}self_attention.{one}_layernorm.weight", (f"{theirs}self_attn.{one}_norm.weight",))
    yield Row(f"{ours}self_attention.linear_proj.weight", (f"{theirs}self_attn.o_proj.weight",))


def _rows_of_mlp(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    yield Row(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",))
    if not layout.num_experts:
        yield from _rows_of_products(layout, f"{ours}mlp.", theirs + "mlp.{}")
        return
    yield Row(f"{ours}mlp.router.weight", (f"{theirs}{layout.router}.weight",))
    for expert in range(layout.num_experts):
        name = theirs + layout.experts.format(expert, "{}")
        yield from _rows_of_products(layout, f"{ours}mlp.experts.local_experts.{expert}.", name)


def _rows_of_products(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    """Yield gate and up, which are one product in Megatron, and down."""
    gate, up, down = (theirs.format(one) + ".weight" for one in layout.products)
    yield Row(
        f"{ours}linear_fc1.weight", (gate, up), lambda parts: torch.cat(list(parts)), lambda whole: whole.chunk(2)
    )
    yield Row(f"{ours}linear_fc2.weight", (down,))


def to_megatron(layout: Layout, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Megatron's tensors by name; ``read`` returns a tensor [n, ...] of Hugging Face's model by its name."""
    for row in rows(layout):
        yield row.name, row.join([read(part) for part in row.parts])


def to_hugging_face(layout: Layout, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Hugging Face's model, of any shape, from Megatron's. The values share memory with those."""
    found: dict[str, torch.Tensor] = {}
    for row in rows(layout):
        found.update(zip(row.parts, row.split(state[row.name]), strict=True))
    return found
