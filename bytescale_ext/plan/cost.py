"""Every formula of work and time, each with its source. Nothing else in the project computes FLOPs or predicts time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.shapes import MicroBatch, Shard

Floats = npt.NDArray[np.float64]

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
        num_expert_layers: how many of the layers have experts in place of one MLP.
        expert_ffn_hidden: there, the inner width that one token passes: of its routed experts and the shared ones.
        num_experts: there, the experts that the router chooses from.
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


LLAMA_7B: Final = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden=11008, gated=True, vocab=32000
)
"""ByteScale's 7B model (section 8; 8 key-value groups), with LLaMA's MLP and vocabulary (Touvron et al. 2023)."""


def linear_flops_per_token(shape: ModelShape) -> float:
    """Forward FLOPs of one token in all matrix products but attention: 2 per weight (Narayanan et al. 2021, appendix).

    Query, key, value and output projections, the MLP or the router and the experts that the token is routed to, and
    the output layer; embedding, norms and softmax are not counted.
    """
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    projections = shape.hidden * (query + key_value) + query * shape.hidden
    width_of_mlps = shape.num_layers * shape.ffn_hidden
    width_of_mlps += shape.num_expert_layers * (shape.expert_ffn_hidden - shape.ffn_hidden)
    mlps = (3 if shape.gated else 2) * shape.hidden * width_of_mlps
    routers = shape.num_expert_layers * shape.hidden * shape.num_experts
    return 2.0 * (shape.num_layers * projections + mlps + routers + shape.hidden * shape.vocab)


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


ATTENTION_BACKWARD_PER_FORWARD: Final = 2.5
"""Attention backward per forward: five matrix products for two (FlashAttention-2, Dao 2023, section 4.1)."""


@dataclass(frozen=True, eq=False)
class SliceShares:
    """How sequences are cut into k slices, as shares of each whole sequence: [n, k] each.

    Attributes:
        tokens: tokens of the slice.
        exchanged: tokens whose keys go round the ring for it: its own where keys are kept, else all up to its end.
        squares: its attention, of that of the sequence.
        kept: whether the keys of the sequence are kept: [n].
    """

    tokens: Floats
    exchanged: Floats
    squares: Floats
    kept: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, cost: CostModel, lengths: Floats, widths: Floats, num_slices: int, kept_tokens: int = 0) -> SliceShares:
        """Slices of equal cost (``CostModel.end_of_share``), before they are rounded to whole tokens.

        A sequence on one rank is cut together with the others of its micro-batch: it counts as k equal parts. Keys of
        sequences of at most ``kept_tokens`` tokens are kept (``document_slices.SliceRule``).
        """
        inner, kept = np.arange(1, num_slices) / num_slices, (lengths <= kept_tokens) & (num_slices > 1)
        stops = cost.end_of_share(lengths[:, None], inner, np.where(kept, widths, 1)[:, None]) / lengths[:, None]
        ends = np.zeros((len(lengths), num_slices + 1))
        ends[:, -1] = 1.0
        ends[:, 1:-1] = np.where((widths == 1)[:, None], inner, stops)
        squares = np.where((widths == 1)[:, None], ends, ends**2)
        tokens = np.diff(ends, axis=1)
        return cls(tokens, np.where(kept[:, None], tokens, ends[:, 1:]), np.diff(squares, axis=1), kept)

    def backward(self, stage: StageCost) -> SliceShares:
        """What travels in the backward pass: of kept keys the sums of gradients alone, which is what c has beyond the
        forward's."""
        share = max(0.0, 1.0 - stage.forward.c / stage.backward.c) if stage.backward.c else 1.0
        return replace(self, exchanged=self.exchanged * np.where(self.kept, share, 1.0)[:, None])


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of tokens on ranks, in seconds (or FLOPs, or any unit), of some layers in one direction or in both.

    A sequence of s tokens on d ranks costs each of them (ByteScale Eq. 3, T(s) = alpha1 s^2 + beta1 s + gamma,
    divided over the ring, with the ring's exchange of keys and values hidden behind attention, section 7)::

        max(a s^2 / d, c s (d - 1) / d) + h s (d - 1) / d + b s / d          and each micro-batch g once

    Attributes:
        a: per squared token, causal attention.
        b: per token, everything that is linear in tokens.
        c: per token whose keys and values a rank receives, hidden behind attention.
        g: per micro-batch.
        h: per token whose keys and values a rank receives, never hidden: blocks are joined, messages handed over and
            waited for and, where processors move the data themselves, copied. The paper has no such term.
    """

    a: float
    b: float
    c: float = 0.0
    g: float = 0.0
    h: float = 0.0

    def attention_cost(self, length: int, width: int) -> float:
        """Attention of a sequence on each of ``width`` ranks: the slower of computing and receiving, and h."""
        received = length * (width - 1)
        return (max(self.a * length * length, self.c * received) + self.h * received) / width

    def linear_cost(self, num_tokens: int) -> float:
        """Everything linear of ``num_tokens`` tokens on their own rank."""
        return self.b * num_tokens

    def sequence_cost(self, length: int, width: int) -> float:
        """A sequence on each of ``width`` ranks, alone in its micro-batch but for ``g``."""
        return self.attention_cost(length, width) + self.b * length / width

    def sequence_costs(self, lengths: Floats, widths: Floats) -> Floats:
        """``sequence_cost`` of many sequences: [n], lengths and widths [n]."""
        return np.asarray(self.attention_costs(lengths, widths) + self.b * lengths / widths)

    def attention_costs(self, lengths: Floats, widths: Floats) -> Floats:
        """``attention_cost`` of many sequences: [n], lengths and widths [n]."""
        received = lengths * (widths - 1)
        return np.asarray((np.maximum(self.a * lengths * lengths, self.c * received) + self.h * received) / widths)

    def end_of_share(self, lengths: Floats, shares: Floats, widths: Floats) -> Floats:
        """The tokens in which this share of a sequence's cost lies (Seq1F1B, Sun et al. 2024, section 3.3).

        Token P costs ``max(2 a P, c (d - 1)) + b`` on d ranks that keep keys: up to some P exchange takes longer.
        """
        exchange = self.c * (widths - 1)
        kink = np.minimum(exchange / max(2 * self.a, 1e-300), lengths)
        extra = exchange * kink - self.a * kink**2
        targets = shares * (self.a * lengths**2 + self.b * lengths + extra)
        squares = np.maximum(targets - extra, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # where b is 0, in the one of the two that is not taken
            before = targets / (exchange + self.b)
            beyond = 2 * squares / (self.b + np.sqrt(self.b**2 + 4 * self.a * squares))
        return np.asarray(np.where(before < kink, before, beyond))

    def slice_costs(self, lengths: Floats, widths: Floats, cut: SliceShares) -> tuple[Floats, Floats]:
        """Each slice of many sequences on each of their ranks, without the ``g`` of each slice of a micro-batch.

        A slice attends to all tokens before it (Seq1F1B, Sun et al. 2024, section 3.3), so with d ranks the keys of the
        tokens up to its end P' travel round once for it (ByteScale section 7); linear work is that of its own tokens::

            max(a (P'^2 - P^2) / d, c P' (d - 1) / d) + h P' (d - 1) / d + b (P' - P) / d

        Where all ranks have kept the keys of the slices before, those of its own tokens travel: P' - P for P'.

        ``lengths``, ``widths``: tokens and ranks of each sequence: [n]. Returns costs, and the part of them that is
        exchange which attention does not hide: [n, k] both.
        """
        attention = (self.a * lengths * lengths / widths)[:, None] * cut.squares
        exchange = (self.c * lengths * (widths - 1) / widths)[:, None] * cut.exchanged
        exposed = np.maximum(exchange - attention, 0.0)
        joined = (self.h * lengths * (widths - 1) / widths)[:, None] * cut.exchanged
        return attention + exposed + (self.b * lengths / widths)[:, None] * cut.tokens + joined, exposed

    def shard_cost(self, shard: Shard, length: int) -> float:
        """A shard of a sequence of ``length`` tokens on its rank; linear work by the tokens that are really there."""
        return self.attention_cost(length, len(shard.ring)) + self.linear_cost(shard.num_tokens)

    def micro_batch_cost(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> float:
        """A micro-batch on its rank; ``lengths`` are the plan's."""
        return self.g + sum(self.shard_cost(shard, lengths[shard.seq]) for shard in micro_batch.shards)

    def scaled(self, factor: float) -> CostModel:
        """The same model in another unit, or of ``factor`` layers."""
        return CostModel(self.a * factor, self.b * factor, self.c * factor, self.g * factor, self.h * factor)

    def __add__(self, other: CostModel) -> CostModel:
        """Both one after the other, with one exchange of keys and values hidden behind the attention of both."""
        return CostModel(self.a + other.a, self.b + other.b, self.c + other.c, self.g + other.g, self.h + other.h)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one pipeline stage (or a whole model without pipelines) costs, forward and backward apart."""

    forward: CostModel
    backward: CostModel

    @property
    def both(self) -> CostModel:
        """Forward and backward together: what a planner balances."""
        return self.forward + self.backward

    def slice_costs(self, lengths: Floats, widths: Floats, cut: SliceShares) -> tuple[tuple[Floats, Floats], ...]:
        """``CostModel.slice_costs`` forward and backward."""
        backward = self.backward.slice_costs(lengths, widths, cut.backward(self))
        return self.forward.slice_costs(lengths, widths, cut), backward


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One model on one device, in seconds and bytes: the content of a cost file.

    Attributes:
        shape: the model that was measured; another one is refused where the file is used.
        device: the hardware, in words.
        dtype: parameter type, for example "bfloat16".
        tensor_parallel: ranks that share each layer.
        source: where the constants are from: a measurement, or a paper with figure and equation.
        forward, backward: of one layer on one rank. ``g`` is the fixed cost of a layer for each micro-batch.
        head_forward, head_backward: seconds per token of embedding, output layer and loss together.
        layer_bytes: activations that one token keeps in one layer until its backward pass.
        recompute_bytes: the same with full recompute (the layer's input).
    """

    shape: ModelShape
    device: str
    dtype: str
    tensor_parallel: int
    source: str
    forward: CostModel
    backward: CostModel
    head_forward: float
    head_backward: float
    layer_bytes: float
    recompute_bytes: float

    def stage(self, num_layers: int, has_head: bool = False) -> StageCost:
        """A pipeline stage of ``num_layers`` layers, and the embedding and output layer with ``has_head``."""
        forward, backward = self.forward.scaled(num_layers), self.backward.scaled(num_layers)
        if has_head:
            forward = replace(forward, b=forward.b + self.head_forward)
            backward = replace(backward, b=backward.b + self.head_backward)
        return StageCost(forward, backward)

    def whole(self) -> StageCost:
        """The whole model on one rank."""
        return self.stage(self.shape.num_layers, has_head=True)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts: the format of a cost file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelCost:
        """The inverse of ``to_json``. Raises ValueError, naming the entry, for what is missing, unknown or negative."""
        try:
            nested: dict[str, Any] = {"shape": ModelShape(**value["shape"])}
            nested |= {name: CostModel(**value[name]) for name in ("forward", "backward")}
            cost = cls(**{**value, **nested})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost file ({error}); `bytescale profile` writes one") from None
        cost._check()
        return cost

    def _check(self) -> None:
        numbers = {f"{name}.{key}": number for name in ("forward", "backward")
                   for key, number in asdict(getattr(self, name)).items()}  # fmt: skip
        for name in ("head_forward", "head_backward", "layer_bytes", "recompute_bytes"):
            numbers[name] = getattr(self, name)
        for name, number in numbers.items():
            if not isinstance(number, int | float) or not 0 <= number < float("inf"):
                raise ValueError(f"the cost file's {name} is {number}; constants are numbers from 0 on")
        for name in ("forward.a", "forward.b", "backward.a", "backward.b"):
            if not numbers[name]:
                raise ValueError(f"the cost file's {name} is 0: attention and linear work both cost time")


def flops_cost(shape: ModelShape) -> CostModel:
    """Costs in FLOPs, forward and backward: predicts the imbalance of a plan with nothing measured (c = g = 0)."""
    passes = 1.0 + BACKWARD_PER_FORWARD
    return CostModel(a=passes * attention_flops_per_square(shape), b=passes * linear_flops_per_token(shape))


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """What bounds the share r of a micro-batch's activations that goes to host memory (ByteScale section 5.2, Eq. 3).

    Two layers stay on the device, the one at work and the one on its way, of the others the share ``1 - r``; so of n
    tokens as many activations stay as of ``n (2 + (1 - r) (l - 2)) / l`` tokens. The paper prints
    ``1 >= r >= min(1, ...)``; what is meant is 0 <= r <= 1, no more of a layer than is copied while one layer computes,
    and, which the paper leaves out, no more than the host holds.

    Attributes:
        num_layers: l, the layers of a rank.
        layer_bytes_per_token: activations that one token keeps in one layer.
        bytes_per_second: between device and host, the slower direction.
        host_bytes: host memory for one micro-batch of one rank.
    """

    num_layers: int
    layer_bytes_per_token: float
    bytes_per_second: float
    host_bytes: float

    def __post_init__(self) -> None:
        if self.num_layers < 1 or min(self.layer_bytes_per_token, self.bytes_per_second) <= 0 or self.host_bytes < 0:
            raise ValueError(f"offload limits need layers, bytes and bytes per second above 0: {self}")

    def hidden_shares(self, lengths: Floats, forward: CostModel) -> Floats:
        """The largest share of each sequence whose copy hides behind computing (Eq. 3, T(s) >= r Act(s) / B): [n].

        Both sides shrink alike with the width of the ring, so it depends on the length only.

        Args:
            lengths: tokens: [n].
            forward: of the rank's ``num_layers`` layers.
        """
        layer_seconds = (forward.a * lengths + forward.b) * lengths / self.num_layers
        return np.minimum(1.0, layer_seconds * self.bytes_per_second / (self.layer_bytes_per_token * lengths))

    def most_tokens(self, lengths: Floats, tokens_per_rank: int, forward: CostModel) -> Floats:
        """The most tokens of each sequence that one rank can hold with offloading: [n], at least ``tokens_per_rank``.

        Eq. 3's D(s) is the length over this. The activations of ``n - C`` tokens in all layers must be elsewhere, so
        the host allows ``C + host_bytes / (l Act(1))``.
        """
        if self.num_layers <= 2:
            return np.full(len(lengths), float(tokens_per_rank))
        kept = 1.0 - self.hidden_shares(lengths, forward) * (self.num_layers - 2) / self.num_layers
        on_host = self.host_bytes / (self.num_layers * self.layer_bytes_per_token)
        return np.minimum(tokens_per_rank / kept, tokens_per_rank + on_host)

    def least_shares(self, num_tokens: Floats, tokens_per_rank: int) -> Floats:
        """The smallest share with which micro-batches of so many tokens fit: [n], 0 for at most ``tokens_per_rank``."""
        if self.num_layers <= 2:
            return np.zeros(len(num_tokens))
        kept = tokens_per_rank / np.maximum(num_tokens, 1.0)
        return np.clip((1.0 - kept) * self.num_layers / (self.num_layers - 2), 0.0, 1.0)

    def least_capacity(self, length: int, num_tokens: int, forward: CostModel) -> float:
        """The smallest C with which ``num_tokens`` tokens of a sequence fit on one rank."""
        if self.num_layers <= 2:
            return float(num_tokens)
        share = float(self.hidden_shares(np.array([float(length)]), forward)[0])
        on_host = self.host_bytes / (self.num_layers * self.layer_bytes_per_token)
        return max(num_tokens * (1.0 - share * (self.num_layers - 2) / self.num_layers), num_tokens - on_host)


def flops_stage_cost(shape: ModelShape, num_stages: int) -> StageCost:
    """FLOPs of the largest pipeline stage: its share of the layers, and the output layer."""
    share = replace(
        shape,
        num_layers=-(-shape.num_layers // num_stages),
        num_expert_layers=-(-shape.num_expert_layers // num_stages),
    )
    both = flops_cost(share)
    forward = both.scaled(1.0 / (1.0 + BACKWARD_PER_FORWARD))
    return StageCost(forward, forward.scaled(BACKWARD_PER_FORWARD))
