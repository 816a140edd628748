"""The sizes of a transformer decoder and its FLOPs; each formula names its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

BACKWARD_PER_FORWARD: Final = 2.0
"""Backward FLOPs per forward FLOP, without recompute: two matrix products for each one (Megatron-LM, Narayanan et
al. 2021, appendix; PaLM, Chowdhery et al. 2022, appendix B)."""

ATTENTION_BACKWARD_PER_FORWARD: Final = 2.5
"""Attention backward per forward: five matrix products for two (FlashAttention-2, Dao 2023, section 4.1)."""


FLOPS_PER_RING_BYTE: Final = 8000.0
"""What a GPU computes while a byte passes between nodes: 400 TFLOP/s in half precision, 50 GB/s (400 Gbit/s)."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of multi-latent attention besides ``ModelShape.head_dim``, which is that of queries and keys.

    Attributes:
        query_rank: numbers of the vector from which queries are projected; 0: they come from the hidden state.
        key_rank: numbers of the latent vector from which keys and values are projected.
        position_dim: part of ``head_dim`` that has positions; the key's is the same for all heads.
        value_dim: width of one head of the values.
        has_norms: the latent vectors are normalized (``--qk-layernorm``).
        is_plain: attention can apply the projection of keys and values itself: it is a matrix product alone, without a
            norm in it as in TransformerEngine, and it is not recomputed by itself.
    """

    query_rank: int
    key_rank: int
    position_dim: int
    value_dim: int
    has_norms: bool = False
    is_plain: bool = True

    @property
    def latent_numbers(self) -> int:
        """Numbers from which the keys and values of one token are rebuilt."""
        return self.key_rank + self.position_dim

    @property
    def norm_weights(self) -> int:
        """Weights of a layer's norms of latent vectors."""
        return self.has_norms * (self.query_rank + self.key_rank)

    @property
    def ring_numbers(self) -> int:
        """Numbers that attention holds and sends for a token where latents travel: halves of equal size."""
        return self.latent_numbers + self.latent_numbers % 2

    def travels(self, num_heads: int, head_dim: int) -> bool:
        """Return whether rings and slices have latents, not keys and values, of ``num_heads`` heads on a rank.

        A latent saves bytes with each hop and costs the projection of the heads on each rank: once in the forward pass
        for 2 bytes a number, three times in the backward pass (again, and for two gradients) for 2 bytes and a sum of
        4. So the two prices have one ratio in both passes.
        """
        saved = 2 * num_heads * max(head_dim, self.value_dim) - self.ring_numbers
        flops = 2.0 * self.key_rank * num_heads * (head_dim - self.position_dim + self.value_dim)
        return self.is_plain and 2 * saved * FLOPS_PER_RING_BYTE > flops


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a transformer decoder that its FLOPs depend on.

    Attributes:
        num_layers: transformer layers.
        hidden: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads (grouped-query attention; equal to num_heads without it).
        head_dim: width of one head.
        ffn_hidden: inner width of the MLP.
        gated: the MLP has a gate (SwiGLU): three matrices, not two.
        vocab: rows of the output layer.
        num_expert_layers: how many of the layers have experts in place of one MLP.
        expert_ffn_hidden: in such a layer, the inner width that one token passes: its routed experts plus the shared
            ones.
        num_experts: in such a layer, the experts that the router chooses from.
        experts_per_token: how many of them it chooses for a token.
        shared_ffn_hidden: the part of ``expert_ffn_hidden`` that is the shared experts', which every token passes.
        num_window_layers: how many of the layers have a sliding window.
        window_tokens: in such a layer, the most keys before its own that a token sees.
        later_layers: layers of multi-token prediction after the others, each with the output layer once more.
        later_experts: the layers of multi-token prediction have experts, as the model's last layer has.
        latent: multi-latent attention (DeepSeek-V2, section 2.1); None: queries, keys and values are projected.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    gated: bool
    vocab: int
    num_expert_layers: int = 0
    expert_ffn_hidden: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    shared_ffn_hidden: int = 0
    num_window_layers: int = 0
    window_tokens: int = 0
    later_layers: int = 0
    later_experts: bool = False
    latent: LatentShape | None = None

    def part(self, num_layers: int) -> ModelShape:
        """Return the sizes of so many of the layers; experts and windows count as if spread evenly over all."""
        experts, windows = (
            -(-of_kind * num_layers // self.num_layers) for of_kind in (self.num_expert_layers, self.num_window_layers)
        )
        return replace(
            self, num_layers=num_layers, num_expert_layers=experts, num_window_layers=windows, later_layers=0
        )

    def stages(self, stage_layers: Sequence[int]) -> list[ModelShape]:
        """Return ``part`` for each pipeline stage; the last one also has the layers of multi-token prediction."""
        found = [self.part(num_layers) for num_layers in stage_layers]
        return [*found[:-1], replace(found[-1], later_layers=self.later_layers)]

    def with_experts_per_token(self, count: float) -> ModelShape:
        """Return the sizes if ``count`` experts run for a token, on average; shared experts run besides."""
        each = (self.expert_ffn_hidden - self.shared_ffn_hidden) / max(1, self.experts_per_token)
        return replace(self, expert_ffn_hidden=round(self.shared_ffn_hidden + count * each))

    @property
    def value_dim(self) -> int:
        """Width of one head of the values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def projection_weights(self) -> int:
        """Weights of the projections of one layer's attention, without norms."""
        output = self.num_heads * self.value_dim * self.hidden
        queries, one = self.num_heads * self.head_dim, self.latent
        if one is None:
            return self.hidden * (queries + 2 * self.num_kv_heads * self.head_dim) + output
        of_queries = one.query_rank * (self.hidden + queries) if one.query_rank else self.hidden * queries
        expanded = self.num_heads * (self.head_dim - one.position_dim + one.value_dim)
        return of_queries + self.hidden * one.latent_numbers + one.key_rank * expanded + output

    @property
    def window(self) -> int | None:
        """The sliding window of the layers that have one; None: no layer has one."""
        return self.window_tokens if self.num_window_layers else None

    @property
    def window_share(self) -> float:
        """The share of the layers that have a sliding window."""
        return self.num_window_layers / self.num_layers


LLAMA_7B: Final = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden=11008, gated=True, vocab=32000
)
"""ByteScale's 7B model (section 8; 8 key-value groups), with LLaMA's MLP and vocabulary (Touvron et al. 2023)."""


def linear_flops_per_token(shape: ModelShape) -> float:
    """Return forward FLOPs of one token without attention: 2 per weight (Narayanan et al. 2021, appendix).

    Query, key, value and output projections, the MLP or the router and the experts that the token is routed to, and
    the output layer; embedding, norms and softmax are not counted.
    """
    width_of_mlps = shape.num_layers * shape.ffn_hidden
    width_of_mlps += shape.num_expert_layers * (shape.expert_ffn_hidden - shape.ffn_hidden)
    mlps = (3 if shape.gated else 2) * shape.hidden * width_of_mlps
    routers = shape.num_expert_layers * shape.hidden * shape.num_experts
    heads = (1 + shape.later_layers) * shape.hidden * shape.vocab
    layers = shape.num_layers * shape.projection_weights + mlps + routers
    return 2.0 * (layers + shape.later_layers * later_layer_weights(shape) + heads)


def layer_flops_per_token(shape: ModelShape) -> float:
    """Return forward FLOPs of one token in one layer without attention, the mean of all layers of the model."""
    return linear_flops_per_token(replace(shape, vocab=0, later_layers=0)) / shape.num_layers


def later_layer_weights(shape: ModelShape) -> int:
    """Return the weights that a token passes in one layer of multi-token prediction, without norms.

    It is a layer after a projection of two hidden states to one, dense or with experts.
    """
    width, router = shape.ffn_hidden, 0
    if shape.later_experts:
        width, router = shape.expert_ffn_hidden, shape.hidden * shape.num_experts
    return shape.projection_weights + (3 if shape.gated else 2) * shape.hidden * width + router + 2 * shape.hidden**2


def attention_flops_per_square(shape: ModelShape) -> float:
    """Return forward FLOPs of causal attention over s tokens without windows, divided by s^2.

    ``4 s^2 head_dim num_heads`` for scores and values, half of it under the causal mask (FlashAttention-2, Dao 2023,
    section 4.1); values may have heads of another size.
    """
    return float((shape.num_layers + shape.later_layers) * shape.num_heads * (shape.head_dim + shape.value_dim))


KEY_SUM_BYTES: Final = 4
"""Gradients of keys and values are summed over slices in float32."""


def has_latents(shape: ModelShape, tensor_parallel: int = 1) -> bool:
    """Return whether rings and slices have latents in place of keys and values."""
    heads = max(1, shape.num_heads // tensor_parallel)
    return shape.latent is not None and shape.latent.travels(heads, shape.head_dim)


def expansion_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return the FLOPs of expanding one token's latent to the keys and values of all heads, in one layer.

    0 where keys and values travel themselves (``has_latents``): their one product is in ``linear_flops_per_token``.
    """
    if shape.latent is None or not has_latents(shape, tensor_parallel):
        return 0.0
    numbers = shape.head_dim - shape.latent.position_dim + shape.latent.value_dim
    return 2.0 * shape.latent.key_rank * shape.num_heads * numbers


def key_value_numbers(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return the numbers of one token's key and value, or of its latent, that attention of one rank's layer holds."""
    if shape.latent is not None and has_latents(shape, tensor_parallel):
        return float(shape.latent.ring_numbers)  # whole on each tensor-parallel rank
    return 2.0 * shape.num_kv_heads * max(shape.head_dim, shape.value_dim) / tensor_parallel


def key_value_bytes(shape: ModelShape, tensor_parallel: int = 1, element_bytes: int = 2) -> float:
    """Return the bytes of one token's key and value, or of its latent, in one layer on one rank."""
    return key_value_numbers(shape, tensor_parallel) * element_bytes


def ring_bytes_per_token(
    shape: ModelShape, tensor_parallel: int, element_bytes: int, sum_bytes: int
) -> tuple[int, int]:
    """Return the bytes that a rank receives in one layer for each token of another rank: forward, backward.

    Keys and values travel in both passes; in the backward pass the sums of their gradients travel too, in a wider type
    (``bytescale_ext.attention.ring``). Latents travel in their place where that is cheaper.
    """
    numbers = int(key_value_numbers(shape, min(tensor_parallel, shape.num_kv_heads)))
    return numbers * element_bytes, numbers * (element_bytes + sum_bytes)
