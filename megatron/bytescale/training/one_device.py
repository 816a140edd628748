"""A GPT of Megatron's layers on one device whose activation policy can change between steps, for measurements.

All policies share weights, kernels, loss and layer objects, so only the policy differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bytescale_ext.activation.arena import allocate_arena
from bytescale_ext.activation.link import make_link
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.step_file import ModelTraits
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from megatron.bytescale import cpu

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from megatron.bytescale.runtime import Runtime


@dataclass
class OneDeviceModel:
    """A model, its activation store, and the values that a training step needs.

    Attributes:
        model: GPTModel in training mode.
        store: store of activations; set ``store.plan`` to choose the policy.
        device: device of the model.
        vocab: vocabulary size.
        weights: initial weights of each run.
    """

    model: MegatronModule
    store: ActivationStore
    device: torch.device
    vocab: int
    weights: list[torch.Tensor] = field(default_factory=list)

    def reset(self) -> None:
        """Restore the initial weights and reset the counts."""
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self.weights, strict=True):
                parameter.copy_(first)
                parameter.grad = None
        self.store.take_counts()

    def batch(self, num_tokens: int, seed: int) -> torch.Tensor:
        """Return random token ids, [num_tokens + 1]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocab, (num_tokens + 1,), generator=generator).to(self.device)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of one sequence, tokens [n + 1], with its autograd graph."""
        from bytescale_ext.attention.layouts.layout import attention_layout
        from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

        length = len(tokens) - 1
        shard = Shard(0, ((0, length),), (0,))
        layout = attention_layout(MicroBatch((shard,)), 0, (length,), length)
        positions = torch.arange(length, device=self.device)
        losses = self.model(
            tokens[None, :-1],
            positions[None],
            None,
            labels=tokens[None, 1:],
            packed_seq_params=DocumentSeqParams(positions=positions, layout=layout),
        )
        return losses.float().mean()

    def step(self, tokens: torch.Tensor, rate: float = 0.1) -> float:
        """Run forward, backward and a plain gradient step on tokens [n + 1]; return the loss."""
        loss = self.loss(tokens)
        loss.backward()
        self.store.check_empty()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=rate)
                    parameter.grad = None
        return float(loss.detach())


def build_model(
    shape: ModelShape,
    dtype: torch.dtype,
    host_bytes: int,
    loss_tokens: int | None = None,
    on_cpu: bool | None = None,
    traits: ModelTraits | None = None,
) -> OneDeviceModel:
    """Build the model on this process's device, in a process group of one. Call it once per process.

    ``traits``: traits of the model. TransformerEngine's layers run with Megatron's own offload instead of policies.
    """
    stand_ins = cpu.install_if_wanted(["--cpu"] if on_cpu else [])  # before the first import of Megatron
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
    from megatron.bytescale.core.models.gpt.chunked_loss import use_chunked_loss
    from megatron.bytescale.core.transformer.norm import LocalNorm
    from megatron.bytescale.core.transformer.transformer_layer import planned_layer_spec
    from megatron.bytescale.runtime import Runtime

    device = torch.device("cpu" if stand_ins is not None else "cuda")
    if not torch.distributed.is_initialized():
        backend = "gloo" if stand_ins is not None else "nccl"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    traits = traits or ModelTraits(fused_activation=stand_ins is None and shape.gated)
    config = _configuration(shape, dtype, stand_ins is not None, traits)
    kernel = choose_kernel(device, dtype, shape.head_dim)[0]
    spec = _layer_spec(Runtime.alone(shape, dtype, device, kernel), traits)
    store = ActivationStore(
        ActivationPlan("none"), make_link(allocate_arena(host_bytes, device.type == "cuda"), device.type == "cuda"),
        shape.num_layers,
    )  # fmt: skip
    block = TransformerBlockSubmodules(layer_specs=[spec] * shape.num_layers, layer_norm=LocalNorm)
    block = block if traits.transformer_impl == "transformer_engine" else planned_layer_spec(block, store)
    model = GPTModel(
        config, block, shape.vocab, traits.learned_positions or 1 << 21, position_embedding_type=traits.positions,
        share_embeddings_and_output_weights=traits.tied_embeddings,
    )  # fmt: skip
    model.to(device=device, dtype=dtype).train()
    use_document_positions([model])
    if loss_tokens is not None:
        use_chunked_loss(loss_tokens, [model])
    built = OneDeviceModel(model, store, device, shape.vocab)
    built.weights = [parameter.detach().clone() for parameter in model.parameters()]
    return built


def stock_model(built: OneDeviceModel, attention: Callable[..., torch.nn.Module]) -> MegatronModule:
    """Return a model of Megatron's own layers with this core attention and the weights of ``built``.

    Megatron's angles are replaced only for micro-batches of documents.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
    from megatron.bytescale.core.transformer.norm import LocalNorm

    config = built.model.config
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    layer: TransformerLayerSubmodules = spec.submodules
    layer.self_attention.submodules.core_attention = attention
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
    block = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=LocalNorm)
    model = GPTModel(config, block, built.vocab, 1 << 21, position_embedding_type="rope")
    model.load_state_dict(built.model.state_dict())
    use_document_positions([model])
    return model.train()


def _layer_spec(runtime: Runtime, traits: ModelTraits) -> ModuleSpec:
    """Return a layer spec of Megatron's or TransformerEngine's modules, with attention over documents."""
    from functools import partial

    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
    from megatron.bytescale.core.transformer.norm import LocalNorm

    engine = traits.transformer_impl == "transformer_engine"
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec(normalization=traits.normalization, qk_layernorm=traits.qk_norms)
    layer: TransformerLayerSubmodules = spec.submodules
    layer.self_attention.submodules.core_attention = partial(DocumentAttention, runtime=runtime)
    if not engine:  # TransformerEngine's products include the norm
        layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
    return spec


def _configuration(shape: ModelShape, dtype: torch.dtype, on_cpu: bool, traits: ModelTraits) -> TransformerConfig:
    """Return Megatron's configuration of the model, without dropout, so that all policies compute equal results."""
    from megatron.core.transformer import TransformerConfig

    offload = {
        "fine_grained_activation_offloading": True, "offload_modules": ["qkv_linear", "core_attn", "attn_proj"],
        "recompute_granularity": "selective", "recompute_modules": ["mlp"],
    }  # fmt: skip
    return TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden, num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads, kv_channels=shape.head_dim, ffn_hidden_size=shape.ffn_hidden,
        gated_linear_unit=shape.gated, normalization=traits.normalization, qk_layernorm=traits.qk_norms,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        add_bias_linear=traits.linear_biases, add_qkv_bias=traits.qkv_biases, hidden_dropout=0.0,
        attention_dropout=0.0, params_dtype=dtype, bf16=dtype == torch.bfloat16, pipeline_dtype=dtype,
        use_cpu_initialization=on_cpu, bias_activation_fusion=traits.fused_activation,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, init_method_std=0.05,
        **(offload if traits.transformer_impl == "transformer_engine" else {}),
    )  # fmt: skip


def end_fine_grained_step() -> None:
    """Reset Megatron's fine-grained offload, as its schedules do after each step."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface

    FineGrainedActivationOffloadingInterface.reset()
