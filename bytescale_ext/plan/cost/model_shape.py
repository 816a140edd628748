"""The sizes of a transformer decoder and its FLOPs; each formula names its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

BACKWARD_PER_FORWARD: Final = 2.0
"""Backward FLOPs per forward FLOP of linear layers, without recompute: two matrix products for each product
(Megatron-LM, Narayanan et al. 2021, appendix; PaLM, Chowdhery et al. 2022, appendix B)."""

ATTENTION_BACKWARD_PER_FORWARD: Final = 2.5
"""Backward FLOPs per forward FLOP of attention: five matrix products for two (FlashAttention-2, Dao 2023, section
4.1)."""


FLOPS_PER_RING_BYTE: Final = 8000.0
"""FLOPs of a GPU in the time of one byte between nodes: 400 TFLOP/s in half precision, 50 GB/s (400 Gbit/s)."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of multi-latent attention. ``ModelShape.head_dim`` is the width of one head of queries and keys.

    Attributes:
        query_rank: width of the latent vector of queries; 0: queries are projected from the hidden state.
        key_rank: width of the latent vector of keys and values.
        position_dim: part of ``head_dim`` with rotary positions, which all heads of the keys share.
        value_dim: width of one head of the values.
        has_norms: whether the latent vectors are normalized (``--qk-layernorm``).
        is_plain: whether attention can apply the projection of keys and values itself. It must be a matrix product
            only, without TransformerEngine's fused norm, and must not be recomputed separately.
    """

    query_rank: int
    key_rank: int
    position_dim: int
    value_dim: int
    has_norms: bool = False
    is_plain: bool = True

    @property
    def latent_numbers(self) -> int:
        """Numbers per token that rebuild its keys and values."""
        return self.key_rank + self.position_dim

    @property
    def norm_weights(self) -> int:
        """Weights of the norms of latent vectors in one layer."""
        return self.has_norms * (self.query_rank + self.key_rank)

    @property
    def ring_numbers(self) -> int:
        """Numbers per token that attention holds and sends when latents travel, padded to two equal halves."""
        return self.latent_numbers + self.latent_numbers % 2

    def travels(self, num_heads: int, head_dim: int) -> bool:
        """Return whether latents travel in rings and slices, in place of keys and values, with ``num_heads`` per rank.

        A latent saves bytes in each hop, and costs one projection of the heads on each rank. The forward pass projects
        once and sends 2 bytes per number. The backward pass projects three times (again, and for two gradients), and
        sends 2 bytes and a 4-byte sum. So the ratio of FLOPs and bytes is equal in both passes.
        """
        saved = num_heads * (head_dim + self.value_dim) - self.ring_numbers
        flops = 2.0 * self.key_rank * num_heads * (head_dim - self.position_dim + self.value_dim)
        return self.is_plain and 2 * saved * FLOPS_PER_RING_BYTE > flops


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a transformer decoder that decide its FLOPs.

    Attributes:
        num_layers: transformer layers.
        hidden: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; fewer than ``num_heads`` with grouped-query attention.
        head_dim: width of one head.
        ffn_hidden: inner width of the MLP.
        gated: whether the MLP has a gate (SwiGLU), with three matrices in place of two.
        vocab: rows of the output layer.
        num_expert_layers: layers with experts in place of one MLP.
        expert_ffn_hidden: inner width of all experts that process one token, routed and shared, in such a layer.
        num_experts: routed experts of such a layer.
        experts_per_token: routed experts that process one token.
        shared_ffn_hidden: part of ``expert_ffn_hidden`` in shared experts, which process every token.
        num_window_layers: layers with a sliding window.
        window_tokens: number of earlier keys that a token attends to in such a layer.
        later_layers: layers of multi-token prediction after the other layers, each with its own output layer.
        later_experts: whether the layers of multi-token prediction have experts, as the model's last layer has.
        later_repeats: whether the layers of multi-token prediction are one layer that runs several times.
        latent: sizes of multi-latent attention (DeepSeek-V2, section 2.1); None: the model has standard attention.
        expert_latent: width of the vectors that routed experts read and write (``--moe-latent-size``), between two
            projections from and to the hidden state; 0: routed experts read and write hidden states.
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
    later_repeats: bool = False
    latent: LatentShape | None = None
    expert_latent: int = 0

    @property
    def later_modules(self) -> int:
        """Number of layers of multi-token prediction with parameters of their own."""
        return min(1, self.later_layers) if self.later_repeats else self.later_layers

    def part(self, num_layers: int) -> ModelShape:
        """Return the sizes of ``num_layers`` of the layers, with experts and windows as if spread evenly over all."""
        experts, windows = (
            -(-count * num_layers // self.num_layers) for count in (self.num_expert_layers, self.num_window_layers)
        )
        return replace(
            self, num_layers=num_layers, num_expert_layers=experts, num_window_layers=windows, later_layers=0
        )

    def stages(self, stage_layers: Sequence[int]) -> list[ModelShape]:
        """Return ``part`` of each pipeline stage. The last stage also has the layers of multi-token prediction."""
        parts = [self.part(num_layers) for num_layers in stage_layers]
        return [*parts[:-1], replace(parts[-1], later_layers=self.later_layers)]

    def with_experts_per_token(self, count: float) -> ModelShape:
        """Return the sizes with ``count`` routed experts per token on average, in addition to shared experts."""
        return replace(self, expert_ffn_hidden=round(self.shared_ffn_hidden + count * self.expert_width))

    @property
    def expert_width(self) -> float:
        """Inner width of one routed expert; 0 without experts."""
        return (self.expert_ffn_hidden - self.shared_ffn_hidden) / max(1, self.experts_per_token)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or of an expert, each of the inner width times the width of its input or output."""
        return 3 if self.gated else 2

    @property
    def token_width(self) -> int:
        """Width of a token at its routed experts."""
        return self.expert_latent or self.hidden

    @property
    def shared_weights(self) -> int:
        """Weights of a layer with experts on every rank: router and both projections of latents."""
        return self.hidden * (self.num_experts + 2 * self.expert_latent)

    @property
    def dense_share(self) -> float:
        """Share of the layers that have one MLP in place of experts."""
        return 1.0 - self.num_expert_layers / self.num_layers

    @property
    def value_dim(self) -> int:
        """Width of one head of the values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def projection_weights(self) -> int:
        """Weights of the attention projections of one layer, without norms."""
        output = self.num_heads * self.value_dim * self.hidden
        query_width, latent = self.num_heads * self.head_dim, self.latent
        if latent is None:
            return self.hidden * (query_width + 2 * self.num_kv_heads * self.head_dim) + output
        if latent.query_rank:
            queries = latent.query_rank * (self.hidden + query_width)
        else:
            queries = self.hidden * query_width
        expanded = self.num_heads * (self.head_dim - latent.position_dim + latent.value_dim)
        return queries + self.hidden * latent.latent_numbers + latent.key_rank * expanded + output

    @property
    def window(self) -> int | None:
        """``window_tokens``, or None if no layer has a sliding window."""
        return self.window_tokens if self.num_window_layers else None

    @property
    def window_share(self) -> float:
        """Share of the layers with a sliding window."""
        return self.num_window_layers / self.num_layers


LLAMA_7B: Final = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden=11008, gated=True, vocab=32000
)
"""ByteScale's 7B model (section 8; 8 key-value groups), with LLaMA's MLP and vocabulary (Touvron et al. 2023)."""


def linear_flops_per_token(shape: ModelShape) -> float:
    """Return the forward FLOPs of one token without attention: 2 per weight (Narayanan et al. 2021, appendix).

    They include the projections of attention, the MLP or the router and the experts of the token with their projections
    of latents, and the output layer, but not embedding, norms and softmax.
    """
    num_dense = shape.num_layers - shape.num_expert_layers
    mlps = num_dense * dense_layer_weights(shape) + shape.num_expert_layers * expert_layer_weights(shape)
    heads = (1 + shape.later_layers) * shape.hidden * shape.vocab
    layers = shape.num_layers * shape.projection_weights + mlps
    return 2.0 * (layers + shape.later_layers * later_layer_weights(shape) + heads)


def dense_layer_weights(shape: ModelShape) -> int:
    """Return the weights of the MLP of a dense layer."""
    return shape.mlp_matrices * shape.hidden * shape.ffn_hidden


def expert_layer_weights(shape: ModelShape) -> int:
    """Return the weights that process one token in the router, the projections and the experts of a layer."""
    widths = shape.hidden * shape.shared_ffn_hidden
    widths += shape.token_width * (shape.expert_ffn_hidden - shape.shared_ffn_hidden)
    return shape.mlp_matrices * widths + shape.shared_weights


def layer_flops_per_token(shape: ModelShape) -> float:
    """Return the forward FLOPs of one token in one layer without attention, the mean over all layers."""
    return linear_flops_per_token(replace(shape, vocab=0, later_layers=0)) / shape.num_layers


def later_layer_weights(shape: ModelShape) -> int:
    """Return the weights that process one token in a layer of multi-token prediction, without norms.

    The layer first projects two hidden states to one. Then it is a dense layer, or a layer with experts.
    """
    mlp = expert_layer_weights(shape) if shape.later_experts else dense_layer_weights(shape)
    return shape.projection_weights + mlp + 2 * shape.hidden**2


def attention_flops_per_square(shape: ModelShape) -> float:
    """Return the forward FLOPs of causal attention over s tokens without windows, divided by s^2.

    Scores and values take ``4 s^2 head_dim num_heads``, half of it under the causal mask (FlashAttention-2, Dao 2023,
    section 4.1). Heads of values may have another width.
    """
    return float((shape.num_layers + shape.later_layers) * shape.num_heads * (shape.head_dim + shape.value_dim))


KEY_SUM_BYTES: Final = 4
"""Bytes per number of the gradient sums of keys and values over slices: float32."""


def has_latents(shape: ModelShape, tensor_parallel: int = 1) -> bool:
    """Return whether latents travel in rings and slices in place of keys and values (``LatentShape.travels``)."""
    heads = max(1, shape.num_heads // tensor_parallel)
    return shape.latent is not None and shape.latent.travels(heads, shape.head_dim)


def expansion_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return the FLOPs of expanding one token's latent to the keys and values of all heads, in one layer.

    The result is 0 if keys and values travel: their single projection is part of ``linear_flops_per_token``.
    """
    if shape.latent is None or not has_latents(shape, tensor_parallel):
        return 0.0
    numbers = shape.head_dim - shape.latent.position_dim + shape.latent.value_dim
    return 2.0 * shape.latent.key_rank * shape.num_heads * numbers


def key_value_numbers(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return the numbers per token in the keys and values, or in the latent, of one layer on one rank."""
    if shape.latent is not None and has_latents(shape, tensor_parallel):
        return float(shape.latent.ring_numbers)  # each tensor-parallel rank has the whole latent
    both = shape.head_dim + shape.value_dim
    return float(shape.num_kv_heads * (both + both % 2)) / tensor_parallel


def key_value_bytes(shape: ModelShape, tensor_parallel: int = 1, element_bytes: int = 2) -> float:
    """Return the bytes per token of the keys and values, or of the latent, of one layer on one rank."""
    return key_value_numbers(shape, tensor_parallel) * element_bytes


def ring_bytes_per_token(
    shape: ModelShape, tensor_parallel: int, element_bytes: int, sum_bytes: int
) -> tuple[int, int]:
    """Return the bytes that a rank receives in one layer for each token of another rank: forward, backward.

    Keys and values travel in both passes; in the backward pass the sums of their gradients travel too, in a wider type
    (``bytescale_ext.attention.ring``). If latents are cheaper to send, they travel instead.
    """
    numbers = int(key_value_numbers(shape, min(tensor_parallel, shape.num_kv_heads)))
    return numbers * element_bytes, numbers * (element_bytes + sum_bytes)
