"""Megatron's own GPT layer specs, with document attention (and a norm for sequence parallelism)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from bytescale_ext.config.hdp import HdpConfig
from megatron.bytescale.core.tensor_parallel.layers import ExpertRowParallelLinear
from megatron.bytescale.core.tensor_parallel.weight_gradients import (
    SplitColumnParallelLinear,
    SplitRowParallelLinear,
)
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention, SampleAttention
from megatron.bytescale.core.transformer.moe.latent_layer import LatentMoELayer
from megatron.bytescale.core.transformer.moe.router import DocumentRouter
from megatron.bytescale.core.transformer.moe.slice_router import SampleRouter
from megatron.bytescale.core.transformer.multi_latent_attention import DocumentLatentAttention
from megatron.bytescale.core.transformer.norm import LocalNorm
from megatron.bytescale.core.transformer.spec_utils import has_experts, layers_of

if TYPE_CHECKING:
    import torch

    from megatron.bytescale.runtime import Runtime


def document_layer_spec(runtime: Runtime) -> Callable[..., ModuleSpec | TransformerBlockSubmodules]:
    """Return ``GPTModelConfig.transformer_layer_spec`` that builds Megatron's default spec with document attention."""

    def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
        spec = copy.deepcopy(default_layer_spec(config, vp_stage))  # type: ignore[arg-type]
        has_engine = config.transformer.transformer_impl == "transformer_engine"
        if isinstance(spec, TransformerBlockSubmodules):  # with experts: one spec per layer, dense or sparse
            for layer in spec.layer_specs:
                _set_document_modules(layer.submodules, runtime, has_engine)
            return spec if has_engine else replace(spec, layer_norm=LocalNorm)
        _set_document_modules(spec.submodules, runtime, has_engine)
        if has_engine:
            return spec
        num_layers = get_num_layers_to_build(config.transformer, vp_stage)  # of this pipeline stage
        return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=LocalNorm)

    return layer_spec


def wrap_mtp_block_spec(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Put our modules into the layers of multi-token prediction. Megatron makes separate specs for these layers.

    Features that change all layers of experts change these layers too (``Parts.layer_specs``).

    An expert router becomes a router over documents. As in Megatron, it routes and counts all tokens except padding.
    These include the last tokens of a document, which have no prediction at this depth.
    """

    def mtp_block_spec(config: GPTModelConfig, *args: object, **kwargs: object) -> Any:
        spec = copy.deepcopy(original(config, *args, **kwargs))
        has_engine = config.transformer.transformer_impl == "transformer_engine"
        shared = {id(layer): layer.submodules for layer in (spec.layer_specs if spec is not None else ())}
        for modules in shared.values():
            if not has_engine:
                modules.enorm = modules.hnorm = modules.layer_norm = LocalNorm
            _set_document_modules(modules.mtp_model_layer.submodules, runtime, has_engine)
            for change in runtime.parts.layer_specs:
                modules.mtp_model_layer = change(modules.mtp_model_layer)
        return spec

    return mtp_block_spec


def with_sample_attention(
    spec: ModuleSpec | TransformerBlockSubmodules, runtime: Runtime
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return a layer's or block's spec with our attention for samples of fixed length."""
    return with_core_attention(spec, partial(SampleAttention, runtime=runtime))


def with_core_attention(
    spec: ModuleSpec | TransformerBlockSubmodules, attention: type | Callable[..., torch.nn.Module]
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return a layer's or block's spec with this ``core_attention``."""
    spec = copy.deepcopy(spec)
    for layer in layers_of(spec):
        layer.submodules.self_attention.submodules.core_attention = attention
    return spec


def dense_layer_spec(spec: ModuleSpec | TransformerBlockSubmodules, has_engine: bool) -> ModuleSpec:
    """Return the spec of a dense layer of a model: its first dense layer, or its first layer with a dense MLP."""
    layers = layers_of(spec)
    dense = [layer for layer in layers if not has_experts(layer.submodules)]
    if dense:
        return dense[0]
    if not has_engine:
        return _with_mlp(layers[0], get_mlp_module_spec_for_backend(LocalSpecProvider()))
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    # TransformerEngine's first product of an MLP has the norm inside.
    return _with_mlp(layers[0], get_mlp_module_spec_for_backend(TESpecProvider()), pre_mlp_layernorm=IdentityOp)


def _with_mlp(layer: ModuleSpec, mlp: object, **modules: object) -> ModuleSpec:
    changed = copy.copy(layer)
    changed.submodules = replace(layer.submodules, mlp=mlp, **modules)
    return changed


def with_split_products(spec: TransformerBlockSubmodules, runtime: Runtime) -> TransformerBlockSubmodules:
    """Change a new block spec of local layers: weight gradients run separately, except in experts."""
    column, row = (partial(kind, runtime=runtime) for kind in (SplitColumnParallelLinear, SplitRowParallelLinear))
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        mlp: ModuleSpec = layer.submodules.mlp
        if not has_experts(layer.submodules):
            dense = replace(mlp.keywords["submodules"], linear_fc1=column, linear_fc2=row)
            layer.submodules.mlp = partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": dense})
    return spec


def _set_document_modules(layer: TransformerLayerSubmodules, runtime: Runtime, has_engine: bool) -> None:
    """Put our attention and router into a layer's spec; without TransformerEngine, also our norms and products."""
    attention = layer.self_attention.submodules
    attention.core_attention = partial(DocumentAttention, runtime=runtime)
    if layer.self_attention.module in (MLASelfAttention, DocumentLatentAttention):  # layers may share a spec
        attention.core_attention = IdentityOp  # the layer builds its own attention
        layer.self_attention.module = DocumentLatentAttention
        layer.self_attention.params = {**layer.self_attention.params, "runtime": runtime}
    mlp: ModuleSpec = layer.mlp
    if has_experts(layer):
        router = SampleRouter if runtime.run.find(HdpConfig) is None else DocumentRouter
        modules = replace(mlp.keywords["submodules"], router=partial(router, runtime=runtime))
        experts: ModuleSpec = modules.experts
        if not has_engine and experts.func is SequentialMLP:
            products = replace(experts.keywords["submodules"], linear_fc2=ExpertRowParallelLinear)
            modules.experts = partial(experts.func, *experts.args, **{**experts.keywords, "submodules": products})
        layer.mlp = partial(LatentMoELayer, **{**mlp.keywords, "submodules": modules})
    if has_engine:
        return
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) not in (None, IdentityOp, L2Norm):  # L2Norm has no weight to mark
            setattr(attention, name, LocalNorm)
