"""Every formula of work and time, each with its source. Nothing else in the project computes FLOPs or predicts time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.shapes import MicroBatch, Shard

BACKWARD_PER_FORWARD: Final = 2.0
"""Backward FLOPs per forward FLOP, without recompute: two matrix products for each one (Megatron-LM, Narayanan et
al. 2021, appendix; PaLM, Chowdhery et al. 2022, appendix B)."""


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
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    gated: bool
    vocab: int


LLAMA_7B: Final = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden=11008, gated=True, vocab=32000
)
"""ByteScale's 7B model (section 8; 8 key-value groups), with LLaMA's MLP and vocabulary (Touvron et al. 2023)."""


def linear_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of one token in all matrix products but attention: 2 per weight (Narayanan et al. 2021, appendix).

    Query, key, value and output projections, the MLP, and the output layer; embedding, norms and softmax are not
    counted.
    """
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    projections = shape.hidden * (query + key_value) + query * shape.hidden
    mlp = (3 if shape.gated else 2) * shape.hidden * shape.ffn_hidden
    return 2.0 * (shape.num_layers * (projections + mlp) + shape.hidden * shape.vocab)


def attention_flops_per_square(shape: ModelShape) -> float:
    """Forward FLOPs of causal attention over s tokens, divided by s^2.

    ``4 s^2 head_dim num_heads`` for scores and values, half of it under the causal mask (FlashAttention-2, Dao 2023,
    section 4.1).
    """
    return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim


def model_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """Forward and backward model FLOPs of whole documents, causal attention counted inside each document only.

    Recomputed work is not model FLOPs (PaLM, Chowdhery et al. 2022, appendix B, "MFU").
    """
    return sum(flops_cost(shape).sequence_cost(length, 1) for length in lengths)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of tokens on ranks, in seconds (or FLOPs, or any unit): forward and backward of all layers.

    A sequence of s tokens on d ranks costs each of them (ByteScale Eq. 3, T(s) = alpha1 s^2 + beta1 s + gamma,
    divided over the ring, with the ring's exchange of keys and values hidden behind attention, section 7)::

        max(a s^2 / d, c s (d - 1) / d) + b s / d          and each micro-batch g once

    Attributes:
        a: per squared token, causal attention.
        b: per token, everything that is linear in tokens.
        c: per token whose keys and values a rank receives.
        g: per micro-batch.
    """

    a: float
    b: float
    c: float = 0.0
    g: float = 0.0

    def attention_cost(self, length: int, width: int) -> float:
        """Attention of a sequence on each of ``width`` ranks: the slower of computing and receiving."""
        return max(self.a * length * length, self.c * length * (width - 1)) / width

    def linear_cost(self, num_tokens: int) -> float:
        """Everything linear of ``num_tokens`` tokens on their own rank."""
        return self.b * num_tokens

    def sequence_cost(self, length: int, width: int) -> float:
        """A sequence on each of ``width`` ranks, alone in its micro-batch but for ``g``."""
        return self.attention_cost(length, width) + self.b * length / width

    def shard_cost(self, shard: Shard, length: int) -> float:
        """A shard of a sequence of ``length`` tokens on its rank; linear work by the tokens that are really there."""
        return self.attention_cost(length, len(shard.ring)) + self.linear_cost(shard.num_tokens)

    def micro_batch_cost(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> float:
        """A micro-batch on its rank; ``lengths`` are the plan's."""
        return self.g + sum(self.shard_cost(shard, lengths[shard.seq]) for shard in micro_batch.shards)

    def scaled(self, factor: float) -> CostModel:
        """The same model in another unit."""
        return replace(self, a=self.a * factor, b=self.b * factor, c=self.c * factor, g=self.g * factor)


def flops_cost(shape: ModelShape) -> CostModel:
    """Costs in FLOPs, forward and backward: predicts the imbalance of a plan with nothing measured (c = g = 0)."""
    passes = 1.0 + BACKWARD_PER_FORWARD
    return CostModel(a=passes * attention_flops_per_square(shape), b=passes * linear_flops_per_token(shape))
