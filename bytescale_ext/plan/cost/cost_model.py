"""Predicted time of sequences, micro-batches and pipeline stages (ByteScale Eq. 3 and section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.nodes import FEWEST_HOPS, Nodes, best_hops_of
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.table import RankShards

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of some layers in one direction or in both, in seconds, FLOPs or any other unit.

    A sequence of s tokens on d ranks costs each of these ranks::

        max(a s^2 / d + ((h + e) s / d + m) (d - 1), c s (d - 1) / d) + b s / d

    and each micro-batch costs g in addition. This is ByteScale's Eq. 3, T(s) = alpha1 s^2 + beta1 s + gamma, divided by
    the ranks of the ring, whose exchange of keys and values overlaps with computation (section 7). For a ring over
    several nodes, the factor (d - 1) of c is ``Nodes.hops``.

    Some layers may have a sliding window of w tokens. In these layers a sequence of more than w tokens has no ring. A
    rank computes the windows of its tokens. It receives the w tokens before its front part and before its back part,
    and this transfer does not overlap::

        a (2 w s - w^2) / d + (c + h + e) min(2 w, s (d - 1) / d) + m min(2, d - 1) + b s / d

    Attributes:
        a: cost per squared token: causal attention.
        b: cost per token of everything that is linear in tokens.
        c: cost per token whose keys and values a rank receives from its own node; it overlaps with a, e, h and m.
        g: cost per micro-batch.
        h: cost per token whose keys and values a rank receives: merging blocks, starting messages and, if processors
            move the data, copying. The paper has no such term.
        nodes: nodes with slower links between them; None: all links are equally fast.
        window: w, number of tokens that a token attends to in layers with a window, including itself.
        window_share: share of the layers with a window; a, c, e and h count all layers as layers without a window.
        m: cost per block of keys and values that a rank receives: starting its kernels, however few tokens the block
            has. The paper has no such term; it makes short sequences on many ranks slow.
        e: cost per token of another rank or an earlier slice whose keys and values a rank expands from latents
            (``attention/latent.py``). Some ranks of a ring expand only the front parts of other ranks' shares. The cost
            counts whole shares, because the ring waits for the ranks that expand whole shares.
    """

    a: float
    b: float
    c: float = 0.0
    g: float = 0.0
    h: float = 0.0
    nodes: Nodes | None = None
    window: int = 0
    window_share: float = 0.0
    m: float = 0.0
    e: float = 0.0

    @overload
    def squares(self, lengths: float) -> float: ...
    @overload
    def squares(self, lengths: Floats) -> Floats: ...
    def squares(self, lengths: float | Floats) -> float | Floats:
        """Return the factor of ``a`` for sequences on one rank, s^2 without windows: a number, or [n]."""
        full = lengths * lengths
        if not self.window_share:
            return full
        beyond = np.maximum(lengths - self.window, 0.0)
        return full - self.window_share * beyond * beyond

    @overload
    def hops(self, widths: float) -> float: ...
    @overload
    def hops(self, widths: Floats) -> Floats: ...
    def hops(self, widths: float | Floats) -> float | Floats:
        """Return the time of a ring's exchange in hops (``Nodes.best_hops``): a number, or [n]."""
        if self.nodes is None:
            return widths - 1
        if isinstance(widths, np.ndarray):
            return self.nodes.best_hops(widths)
        return widths - 1 if widths <= self.nodes.ranks else best_hops_of(self.nodes, int(widths))

    @overload
    def attention_cost(self, lengths: float, widths: float, hops: float | None = None) -> float: ...
    @overload
    def attention_cost(self, lengths: Floats, widths: Floats, hops: Floats | None = None) -> Floats: ...
    def attention_cost(
        self, lengths: float | Floats, widths: float | Floats, hops: float | Floats | None = None
    ) -> float | Floats:
        """Return the cost of attention on each rank of a ring, computing or receiving: a number, or [n].

        The slower of both counts, because they overlap.

        ``lengths``, ``widths``: tokens and ranks of a sequence, or [n]; ``hops``: time of the exchange, or [n]; None:
        ``self.hops(widths)``.
        """
        received = lengths * (self.hops(widths) if hops is None else hops)
        slower = np.maximum if isinstance(received, np.ndarray) else max  # max is much faster for numbers
        full = slower(self._computing(lengths, widths), self.c * received) / widths
        return self._with_windows(full, lengths, widths) if self.window_share else full

    def _computing(self, lengths: float | Floats, widths: float | Floats) -> float | Floats:
        """Return the computation of a ring's ranks together, with which the exchange overlaps: a number, or [n]."""
        return self.a * lengths * lengths + ((self.h + self.e) * lengths + self.m * widths) * (widths - 1)

    def _with_windows(self, full: float | Floats, lengths: float | Floats, widths: float | Floats) -> float | Floats:
        """Return the cost of attention in layers with and without windows; ``full``: the cost without windows."""
        tokens, ranks = np.asarray(lengths, dtype=np.float64), np.asarray(widths, dtype=np.float64)
        beyond, share = np.maximum(tokens - self.window, 0.0), self.limited_share(tokens)
        limited = self.a * (tokens * tokens - beyond * beyond) / ranks
        received = self.window_received(tokens, ranks)
        limited += self.c * received + self.window_work(received, ranks)
        cost = (1.0 - share) * full + share * limited
        return cost if isinstance(full, np.ndarray) else float(cost)

    def exposed_exchange(self, lengths: Floats, widths: Floats, hops: Floats) -> Floats:
        """Return the part of ``attention_cost`` that is exchange without overlap: [n], as the arguments."""
        full = np.maximum(0.0, self.c * lengths * hops - self._computing(lengths, widths)) / widths
        share = self.limited_share(lengths)
        return np.asarray((1.0 - share) * full + share * self.c * self.window_received(lengths, widths))

    def limited_share(self, lengths: Floats) -> Floats:
        """Return the share of the layers whose window is shorter than each sequence: [n]."""
        return np.asarray(np.where(lengths > self.window, self.window_share, 0.0))

    def window_received(self, lengths: Floats, widths: Floats) -> Floats:
        """Return the tokens whose keys a rank receives in a layer with a window: [n], as the arguments."""
        return np.minimum(2.0 * self.window, lengths * (widths - 1) / widths)

    def window_work(self, received: Floats, widths: Floats) -> Floats:
        """Return the cost of joining received keys in a layer with a window: [n], or [n, k] for slices.

        ``received``: received tokens, in at most two blocks: before the rank's front part and before its back part.
        """
        return np.asarray((self.h + self.e) * received + self.m * np.minimum(widths - 1, 2))

    @overload
    def sequence_cost(self, lengths: float, widths: float) -> float: ...
    @overload
    def sequence_cost(self, lengths: Floats, widths: Floats) -> Floats: ...
    def sequence_cost(self, lengths: float | Floats, widths: float | Floats) -> float | Floats:
        """Return the cost of a sequence on each rank of its ring, without ``g``: a number, or [n]."""
        return self.attention_cost(lengths, widths) + self.b * lengths / widths  # type: ignore[arg-type]

    def linear_cost(self, num_tokens: int) -> float:
        """Return the linear cost of ``num_tokens`` tokens on one rank."""
        return self.b * num_tokens

    def work(self, tokens: float, squares: float) -> float:
        """Return a lower bound of the cost of sequences on all ranks together.

        It counts no exchange, no ``g`` and no attention in layers with a window.

        Args:
            tokens: tokens of all sequences.
            squares: sum of the squared lengths.
        """
        return self.b * tokens + self.a * (1.0 - self.window_share) * squares

    def end_of_share(self, lengths: Floats, shares: Floats, widths: Floats) -> Floats:
        """Return the token at which a share of a sequence's cost ends (Seq1F1B, Sun et al. 2024, section 3.3).

        Token P costs ``max(2 a P, c (d - 1)) + b`` on d ranks that keep keys: up to some P, exchange takes longer than
        attention. With windows, exchange is ignored, and the cost is ``a squares + b s``.

        The arguments broadcast to the shape of the result.
        """
        if self.window_share:
            return self._end_with_windows(lengths, shares)
        exchange = self.c * (widths - 1)
        kink = np.minimum(exchange / max(2 * self.a, 1e-300), lengths)
        extra = exchange * kink - self.a * kink**2
        targets = shares * (self.a * lengths**2 + self.b * lengths + extra)
        squares = np.maximum(targets - extra, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # b = 0 spoils only the branch that is not taken
            before = targets / (exchange + self.b)
            beyond = 2 * squares / (self.b + np.sqrt(self.b**2 + 4 * self.a * squares))
        return np.asarray(np.where(before < kink, before, beyond))

    def _end_with_windows(self, lengths: Floats, shares: Floats) -> Floats:
        """Return the token at which a share of ``a squares + b s`` ends. The arguments broadcast to the result's shape.

        Up to the window the cost is ``a P^2 + b P``; beyond it ``a (1 - f) P^2 + (b + 2 a f w) P - a f w^2``.
        """
        a, w, f = self.a, float(self.window), self.window_share
        targets = shares * (a * self.squares(np.asarray(lengths, dtype=np.float64)) + self.b * lengths)
        within = 2 * targets / (self.b + np.sqrt(self.b**2 + 4 * a * targets))
        rest, slope = targets + a * f * w * w, self.b + 2 * a * f * w
        beyond = 2 * rest / (slope + np.sqrt(slope**2 + 4 * a * (1.0 - f) * rest))
        return np.asarray(np.where(within <= w, within, beyond))

    def shard_cost(self, shard: Shard, length: int) -> float:
        """Return the cost of a shard of a sequence of ``length`` tokens. Linear work counts the shard's own tokens."""
        ratio = shard.num_tokens * len(shard.ring) / length if shard.shares else 1.0
        return ratio * self.attention_cost(length, len(shard.ring)) + self.linear_cost(shard.num_tokens)

    def micro_batch_cost(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> float:
        """Return the cost of a micro-batch on its rank. ``lengths``: tokens of each sequence of the plan."""
        return self.g + sum(self.shard_cost(shard, lengths[shard.seq]) for shard in micro_batch.shards)

    def rank_cost(self, shards: RankShards, lengths: Sequence[int]) -> float:
        """Return the cost of all micro-batches of a rank. ``lengths``: tokens of each sequence of the plan."""
        shard_lengths = np.array([lengths[seq] for seq in shards.seqs.tolist()], dtype=np.float64)
        attention = self.attention_cost(shard_lengths, shards.widths.astype(np.float64))
        attention[shards.uneven] *= (shards.tokens * shards.widths / shard_lengths)[shards.uneven]
        linear = self.linear_cost(int(shards.tokens.sum()))
        return self.g * shards.num_micro_batches + float(attention.sum()) + linear

    def floor(self) -> CostModel:
        """Return a lower bound of this cost for every ring, with which d times the cost on d ranks never falls with d.

        It counts ``FEWEST_HOPS (d - 1)`` hops if rings can have inner rings, else d - 1.
        """
        has_inner_rings = self.nodes is not None and self.nodes.hierarchical
        return replace(self, c=self.c * (FEWEST_HOPS if has_inner_rings else 1.0), nodes=None)

    def scaled(self, factor: float) -> CostModel:
        """Return ``factor`` times this cost: the cost of ``factor`` layers, or the cost in another unit."""
        return replace(self, **{name: getattr(self, name) * factor for name in _CONSTANTS})

    def __add__(self, other: CostModel) -> CostModel:
        """Return the sum of both costs. The sum of their exchanges overlaps with the sum of their computation."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _CONSTANTS})


_CONSTANTS: Final = ("a", "b", "c", "g", "h", "m", "e")
"""Fields of ``CostModel`` that are costs."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one pipeline stage, or of the whole model without pipelines.

    Attributes:
        forward, backward: cost of all layers of the stage, in each direction.
        key_read: time to copy the keys and values of one token, in all layers of the stage, between the device and host
            memory, one way. It overlaps with all other work.
    """

    forward: CostModel
    backward: CostModel
    key_read: float = 0.0

    @property
    def both(self) -> CostModel:
        """Cost of forward and backward together, which planners balance."""
        return self.forward + self.backward

    def on(self, nodes: Nodes | None) -> StageCost:
        """Return the cost on a cluster of these nodes."""
        forward, backward = (replace(cost, nodes=nodes) for cost in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def with_linear(self, factor: float) -> StageCost:
        """Return the cost with ``factor`` times the work that is linear in tokens."""
        forward, backward = (replace(cost, b=cost.b * factor) for cost in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def with_padding(self, num_rows: float) -> StageCost:
        """Return the cost if each micro-batch, or slice, has ``num_rows`` rows of padding, without attention."""
        forward, backward = (replace(cost, g=cost.g + cost.b * num_rows) for cost in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def floor(self) -> StageCost:
        """Return ``CostModel.floor`` of both directions."""
        return StageCost(self.forward.floor(), self.backward.floor())
