"""Which tensors of a Hugging Face model make which of Megatron's, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.convert.layout import Layout
from bytescale_ext.convert.products import join_qkv, split_qkv, stack, unstack

Change = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
QUERIES = {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
KEYS = {
    "linear_kv_down_proj": "kv_a_proj_with_mqa", "kv_layernorm": "kv_a_layernorm", "linear_kv_up_proj": "kv_b_proj",
}  # fmt: skip
"""Megatron's names in latent attention, and DeepSeek-V2's."""


@dataclass(frozen=True)
class Row:
    """Tensors of Megatron's that are made of the same ones of another model.

    Attributes:
        names: in Megatron.
        parts: names of the tensors that they are made of, in Hugging Face's model.
        join: makes them of those.
        split: makes those of them.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    join: Change = lambda parts: parts
    split: Change = lambda wholes: wholes


def rows(layout: Layout) -> Iterator[Row]:
    """Yield the tensors of a model, each of Megatron's once."""
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(layout.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield _same(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight")
        attention = _rows_of_latent_attention if layout.latent else _rows_of_attention
        yield from attention(layout, f"{ours}self_attention.", f"{theirs}self_attn.")
        yield _same(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight")
        if layout.num_experts and layer >= layout.num_dense:
            yield from _rows_of_experts(layout, f"{ours}mlp.", theirs)
        else:
            yield from _rows_of_products(layout, f"{ours}mlp.", theirs + "mlp.{}")
    yield _same("decoder.final_layernorm.weight", "model.norm.weight")
    if not layout.is_tied:
        yield _same("output_layer.weight", "lm_head.weight")


def _same(name: str, part: str) -> Row:
    return Row((name,), (part,))


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _rows_of_attention(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    for kind in _kinds(layout.qkv_bias):
        yield Row(
            (f"{ours}linear_qkv.{kind}",),
            tuple(f"{theirs}{one}_proj.{kind}" for one in "qkv"),
            lambda parts: (join_qkv(parts, layout.num_groups, layout.head_dim),),
            lambda wholes: split_qkv(wholes[0], layout.num_groups, layout.head_dim),
        )
    for one in "qk" if layout.qk_norm else "":
        yield _same(f"{ours}{one}_layernorm.weight", f"{theirs}{one}_norm.weight")
    if layout.has_sinks:
        yield _same(f"{ours}core_attention.softmax_offset", f"{theirs}sinks")
    for kind in _kinds(layout.proj_bias):
        yield _same(f"{ours}linear_proj.{kind}", f"{theirs}o_proj.{kind}")


def _rows_of_latent_attention(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    """Yield what becomes of hidden states; heads have their part without positions first, in both models."""
    queries = QUERIES if layout.latent == "queries" else {"linear_q_proj": "q_proj"}
    for name, part in {**queries, **KEYS, "linear_proj": "o_proj"}.items():
        yield _same(f"{ours}{name}.weight", f"{theirs}{part}.weight")


def _rows_of_experts(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    for kind in _kinds(layout.proj_bias):
        yield _same(f"{ours}router.{kind}", f"{theirs}{layout.router}.{kind}")
    if layout.is_stacked:
        yield from _rows_of_stacks(layout, f"{ours}experts.local_experts.", f"{theirs}mlp.experts.")
    else:
        for expert in range(layout.num_experts):
            name = theirs + layout.experts.format(expert, "{}")
            yield from _rows_of_products(layout, f"{ours}experts.local_experts.{expert}.", name)
    if layout.has_shared:
        yield from _rows_of_products(layout, f"{ours}shared_experts.", theirs + "mlp.shared_experts.{}")


def _rows_of_stacks(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    """Yield the products of all experts of a layer, each of which is one tensor."""
    for ending, kind in (("", "weight"), ("_bias", "bias")):
        for ours_is, theirs_is in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            names = tuple(f"{ours}{expert}.{ours_is}.{kind}" for expert in range(layout.num_experts))
            yield _row_of_stack(names, f"{theirs}{theirs_is}{ending}", alternates=theirs_is == "gate_up_proj")


def _row_of_stack(names: tuple[str, ...], part: str, alternates: bool) -> Row:
    """Return the row of one stacked tensor and the tensors of its experts."""
    return Row(
        names,
        (part,),
        lambda parts: unstack(parts[0], alternates),
        lambda wholes: (stack(wholes, alternates),),
    )


def _rows_of_products(layout: Layout, ours: str, theirs: str) -> Iterator[Row]:
    """Yield gate and up, which are one product in Megatron, and down."""
    gate, up, down = (theirs.format(one) + ".weight" for one in layout.products)
    yield Row(
        (f"{ours}linear_fc1.weight",),
        (gate, up),
        lambda parts: (torch.cat(list(parts)),),
        lambda wholes: wholes[0].chunk(2),
    )
    yield _same(f"{ours}linear_fc2.weight", down)


def to_megatron(layout: Layout, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Megatron's tensors by name; ``read`` returns a tensor [n, ...] of Hugging Face's model by its name.

    Raises ValueError for stacked experts that are not as many as the layout has.
    """
    for row in rows(layout):
        made = row.join([read(part) for part in row.parts])
        if len(made) != len(row.names):
            raise ValueError(f"--input: {row.parts[0]} has {len(made)} experts, not {len(row.names)}")
        yield from zip(row.names, made, strict=True)


def to_hugging_face(layout: Layout, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Hugging Face's model, of any shape, from Megatron's; most share memory with those."""
    found: dict[str, torch.Tensor] = {}
    for row in rows(layout):
        found.update(zip(row.parts, row.split([state[name] for name in row.names]), strict=True))
    return found
