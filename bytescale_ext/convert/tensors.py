"""Mapping of tensors between Hugging Face's and Megatron's checkpoints of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bytescale_ext.convert.layout import CheckpointLayout
from bytescale_ext.convert.products import join_qkv, split_qkv, stack, unstack

Conversion = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
LATENT_QUERIES = {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
LATENT_KEYS = {
    "linear_kv_down_proj": "kv_a_proj_with_mqa", "kv_layernorm": "kv_a_layernorm", "linear_kv_up_proj": "kv_b_proj",
}  # fmt: skip
"""Names of the modules of latent attention: Megatron's, then DeepSeek-V2's."""


@dataclass(frozen=True)
class TensorMapping:
    """A set of Megatron's tensors and the set of Hugging Face's tensors with the same values.

    Attributes:
        names: names of Megatron's tensors.
        hf_names: names of Hugging Face's tensors.
        from_hf: converts the tensors of ``hf_names`` to the tensors of ``names``.
        to_hf: converts the tensors of ``names`` to the tensors of ``hf_names``.
    """

    names: tuple[str, ...]
    hf_names: tuple[str, ...]
    from_hf: Conversion = lambda hf_tensors: hf_tensors
    to_hf: Conversion = lambda tensors: tensors


def tensor_mappings(layout: CheckpointLayout) -> Iterator[TensorMapping]:
    """Yield the mappings of all tensors of a model; each tensor occurs in one mapping."""
    yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(layout.num_layers):
        prefix, hf_prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield _same(f"{prefix}input_layernorm.weight", f"{hf_prefix}input_layernorm.weight")
        attention = _latent_attention if layout.latent else _attention
        yield from attention(layout, f"{prefix}self_attention.", f"{hf_prefix}self_attn.")
        yield _same(f"{prefix}pre_mlp_layernorm.weight", f"{hf_prefix}post_attention_layernorm.weight")
        if layout.num_experts and layer >= layout.num_dense:
            yield from _experts(layout, f"{prefix}mlp.", hf_prefix)
        else:
            yield from _mlp(layout, f"{prefix}mlp.", hf_prefix + "mlp.{}")
    yield _same("decoder.final_layernorm.weight", "model.norm.weight")
    if not layout.is_tied:
        yield _same("output_layer.weight", "lm_head.weight")


def _same(name: str, hf_name: str) -> TensorMapping:
    return TensorMapping((name,), (hf_name,))


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _attention(layout: CheckpointLayout, prefix: str, hf_prefix: str) -> Iterator[TensorMapping]:
    for kind in _kinds(layout.qkv_bias):
        yield TensorMapping(
            (f"{prefix}linear_qkv.{kind}",),
            tuple(f"{hf_prefix}{letter}_proj.{kind}" for letter in "qkv"),
            lambda hf_tensors: (join_qkv(hf_tensors, layout.num_groups, layout.head_dim),),
            lambda tensors: split_qkv(tensors[0], layout.num_groups, layout.head_dim),
        )
    for letter in "qk" if layout.qk_norm else "":
        yield _same(f"{prefix}{letter}_layernorm.weight", f"{hf_prefix}{letter}_norm.weight")
    if layout.has_sinks:
        yield _same(f"{prefix}core_attention.softmax_offset", f"{hf_prefix}sinks")
    for kind in _kinds(layout.proj_bias):
        yield _same(f"{prefix}linear_proj.{kind}", f"{hf_prefix}o_proj.{kind}")


def _latent_attention(layout: CheckpointLayout, prefix: str, hf_prefix: str) -> Iterator[TensorMapping]:
    """Yield the projections and norms. In both models a head starts with its part without positions."""
    queries = LATENT_QUERIES if layout.latent == "queries" else {"linear_q_proj": "q_proj"}
    for name, hf_name in {**queries, **LATENT_KEYS, "linear_proj": "o_proj"}.items():
        yield _same(f"{prefix}{name}.weight", f"{hf_prefix}{hf_name}.weight")


def _experts(layout: CheckpointLayout, prefix: str, hf_prefix: str) -> Iterator[TensorMapping]:
    for kind in _kinds(layout.proj_bias):
        yield _same(f"{prefix}router.{kind}", f"{hf_prefix}{layout.router}.{kind}")
    if layout.has_expert_bias:
        yield _same(f"{prefix}router.expert_bias", f"{hf_prefix}{layout.router}.e_score_correction_bias")
    if layout.is_stacked:
        yield from _stacked_experts(layout, f"{prefix}experts.local_experts.", f"{hf_prefix}mlp.experts.")
    else:
        for expert in range(layout.num_experts):
            hf_expert = hf_prefix + layout.experts.format(expert, "{}")
            yield from _mlp(layout, f"{prefix}experts.local_experts.{expert}.", hf_expert)
    if layout.has_shared:
        yield from _mlp(layout, f"{prefix}shared_experts.", hf_prefix + "mlp.shared_experts.{}")


def _stacked_experts(layout: CheckpointLayout, prefix: str, hf_prefix: str) -> Iterator[TensorMapping]:
    """Yield the mappings of a layer whose experts are stacked in one tensor per product."""
    for ending, kind in (("", "weight"), ("_bias", "bias")):
        for product, hf_product in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            names = tuple(f"{prefix}{expert}.{product}.{kind}" for expert in range(layout.num_experts))
            yield _stack(names, f"{hf_prefix}{hf_product}{ending}", alternates=hf_product == "gate_up_proj")


def _stack(names: tuple[str, ...], hf_name: str, alternates: bool) -> TensorMapping:
    """Return the mapping between a stacked tensor and the tensors of its experts."""
    return TensorMapping(
        names,
        (hf_name,),
        lambda hf_tensors: unstack(hf_tensors[0], alternates),
        lambda tensors: (stack(tensors, alternates),),
    )


def _mlp(layout: CheckpointLayout, prefix: str, hf_format: str) -> Iterator[TensorMapping]:
    """Yield the mappings of an MLP; Megatron fuses the gate and up projections."""
    gate, up, down = (hf_format.format(product) + ".weight" for product in layout.products)
    yield TensorMapping(
        (f"{prefix}linear_fc1.weight",),
        (gate, up),
        lambda hf_tensors: (torch.cat(list(hf_tensors)),),
        lambda tensors: tensors[0].chunk(2),
    )
    yield _same(f"{prefix}linear_fc2.weight", down)


def to_megatron(layout: CheckpointLayout, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of Megatron's model.

    ``read`` returns the tensor [n, ...] of a Hugging Face name. Raises ValueError if a stacked tensor has another
    number of experts than the layout, or if tensors do not have the layout's heads.
    """
    for mapping in tensor_mappings(layout):
        given = [read(hf_name) for hf_name in mapping.hf_names]
        try:
            tensors = mapping.from_hf(given)
        except (RuntimeError, IndexError) as error:  # torch cannot divide or join them
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in zip(mapping.hf_names, given, strict=True))
            raise ValueError(f"--input: tensors with other shapes than config.json says: {shapes}") from error
        if len(tensors) != len(mapping.names):
            raise ValueError(f"--input: {mapping.hf_names[0]} has {len(tensors)} experts, not {len(mapping.names)}")
        yield from zip(mapping.names, tensors, strict=True)


def to_hugging_face(layout: CheckpointLayout, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Hugging Face's model, of any shape; most share memory with the tensors of ``state``."""
    hf_state: dict[str, torch.Tensor] = {}
    for mapping in tensor_mappings(layout):
        hf_tensors = mapping.to_hf([state[name] for name in mapping.names])
        hf_state.update(zip(mapping.hf_names, hf_tensors, strict=True))
    return hf_state
