"""Predict the time of sequences, micro-batches and pipeline stages (ByteScale Eq. 3 and section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.nodes import FEWEST_HOPS, Nodes
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.table import RankShards

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of tokens on ranks, in seconds (or FLOPs, or any unit), of some layers in one direction or in both.

    A sequence of s tokens on d ranks costs each of them (ByteScale Eq. 3, T(s) = alpha1 s^2 + beta1 s + gamma,
    divided over the ring, with the ring's exchange of keys and values hidden behind its computing, section 7)::

        max(a s^2 / d + ((h + e) s / d + m) (d - 1), c s (d - 1) / d) + b s / d    and each micro-batch g once

    A ring over several nodes has ``Nodes.hops`` instead of d - 1 beside c.

    Some layers may have a sliding window of w tokens. There a sequence of more than w tokens has no ring. A rank
    computes the windows of its tokens, and receives the w tokens before its front and before its back part, which
    nothing hides::

        a (2 w s - w^2) / d + (c + h + e) min(2 w, s (d - 1) / d) + m min(2, d - 1) + b s / d

    Attributes:
        a: per squared token, causal attention.
        b: per token, everything that is linear in tokens.
        c: per token whose keys and values a rank receives inside a node, hidden behind a, e, h and m.
        g: per micro-batch.
        h: per token whose keys and values a rank receives: the work of merging blocks, starting messages and, where
            processors move the data themselves, copying. The paper has no such term.
        nodes: links between nodes are slower; None: all are alike.
        window: w, the most tokens that a token sees in these layers, itself included.
        window_share: the share of the layers that have a window; a, c, e, h are of all layers, as if none had one.
        m: per block of keys and values that a rank receives of a sequence: the work of starting its kernels, however
            few tokens it has. The paper has no such term; it makes short sequences on many ranks slow.
        e: per token of another rank, or of an earlier slice, whose keys and values a rank expands from latents
            (``attention/latent.py``). Some ranks of a ring expand only the front parts of the others' shares; the cost
            is that of ranks that expand whole shares, because the ring waits for them.
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
        """Return what ``a`` multiplies for sequences on one rank, s^2 without windows: one or many, [n]."""
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
        """Return the time of the exchange of rings, in hops (``Nodes.best_hops``): one or many, [n]."""
        if self.nodes is None:
            return widths - 1
        if isinstance(widths, np.ndarray):
            return self.nodes.best_hops(widths)
        return widths - 1 if widths <= self.nodes.ranks else float(self.nodes.best_hops(np.array([widths]))[0])

    @overload
    def attention_cost(self, lengths: float, widths: float, hops: float | None = None) -> float: ...
    @overload
    def attention_cost(self, lengths: Floats, widths: Floats, hops: Floats | None = None) -> Floats: ...
    def attention_cost(
        self, lengths: float | Floats, widths: float | Floats, hops: float | Floats | None = None
    ) -> float | Floats:
        """Return the cost of attention on each rank of a ring: the slower of computing and receiving.

        ``lengths`` and ``widths`` are tokens and ranks of one sequence, or of many: [n] each, and so is the result.
        ``hops``: the time of the exchange; by default ``self.hops(widths)``.
        """
        received = lengths * (self.hops(widths) if hops is None else hops)
        slower = np.maximum if isinstance(received, np.ndarray) else max  # max is much faster for numbers
        full = slower(self._computing(lengths, widths), self.c * received) / widths
        return self._with_windows(full, lengths, widths) if self.window_share else full

    def _computing(self, lengths: float | Floats, widths: float | Floats) -> float | Floats:
        """Return what all ranks of a ring compute together, which hides their exchange: one or many, [n]."""
        return self.a * lengths * lengths + ((self.h + self.e) * lengths + self.m * widths) * (widths - 1)

    def _with_windows(self, full: float | Floats, lengths: float | Floats, widths: float | Floats) -> float | Floats:
        """Return the cost of attention where ``full`` is that without windows; arguments as in ``attention_cost``."""
        tokens, ranks = np.asarray(lengths, dtype=np.float64), np.asarray(widths, dtype=np.float64)
        beyond, share = np.maximum(tokens - self.window, 0.0), self.limited_share(tokens)
        limited = self.a * (tokens * tokens - beyond * beyond) / ranks
        received = self.window_received(tokens, ranks)
        limited += self.c * received + self.window_work(received, ranks)
        cost = (1.0 - share) * full + share * limited
        return cost if isinstance(full, np.ndarray) else float(cost)

    def exposed_exchange(self, lengths: Floats, widths: Floats, hops: Floats) -> Floats:
        """Return the part of ``attention_cost`` that is exchange not hidden behind computing: [n], as the arguments."""
        full = np.maximum(0.0, self.c * lengths * hops - self._computing(lengths, widths)) / widths
        share = self.limited_share(lengths)
        return np.asarray((1.0 - share) * full + share * self.c * self.window_received(lengths, widths))

    def limited_share(self, lengths: Floats) -> Floats:
        """Return the share of the layers in which a window limits sequences: [n]."""
        return np.asarray(np.where(lengths > self.window, self.window_share, 0.0))

    def window_received(self, lengths: Floats, widths: Floats) -> Floats:
        """Return the tokens whose keys a rank receives in a layer with a window: [n], as the arguments."""
        return np.minimum(2.0 * self.window, lengths * (widths - 1) / widths)

    def window_work(self, received: Floats, widths: Floats) -> Floats:
        """Return the work of joining what a rank receives in a layer with a window: [n], or [n, k] of slices.

        ``received``: tokens; they are of up to two blocks, before the rank's front part and before its back part.
        """
        return np.asarray((self.h + self.e) * received + self.m * np.minimum(widths - 1, 2))

    @overload
    def sequence_cost(self, lengths: float, widths: float) -> float: ...
    @overload
    def sequence_cost(self, lengths: Floats, widths: Floats) -> Floats: ...
    def sequence_cost(self, lengths: float | Floats, widths: float | Floats) -> float | Floats:
        """Return the cost of a sequence on each rank of its ring, without ``g``; many sequences: [n] each."""
        return self.attention_cost(lengths, widths) + self.b * lengths / widths  # type: ignore[arg-type]

    def linear_cost(self, num_tokens: int) -> float:
        """Return the linear cost of ``num_tokens`` tokens on one rank."""
        return self.b * num_tokens

    def work(self, tokens: float, squares: float) -> float:
        """Return a cost that sequences do not undercut on all ranks together: without windows, exchange and launches.

        Args:
            tokens: of all sequences.
            squares: the sum of the squares of their lengths.
        """
        return self.b * tokens + self.a * (1.0 - self.window_share) * squares

    def end_of_share(self, lengths: Floats, shares: Floats, widths: Floats) -> Floats:
        """Return the number of first tokens that cost this share of a sequence (Seq1F1B, Sun et al. 2024, section 3.3).

        Token P costs ``max(2 a P, c (d - 1)) + b`` on d ranks that keep keys: up to some P, exchange takes longer than
        attention. All arguments broadcast to the shape of the result.

        With windows this inverts ``squares``, in which token P costs less beyond the window; exchange is left out.
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
        """Return where a share of ``a squares + b s`` ends: the arguments broadcast to the shape of the result.

        Up to the window the cost is ``a P^2 + b P``; beyond it ``a (1 - f) P^2 + (b + 2 a f w) P - a f w^2``.
        """
        a, w, f = self.a, float(self.window), self.window_share
        targets = shares * (a * self.squares(np.asarray(lengths, dtype=np.float64)) + self.b * lengths)
        within = 2 * targets / (self.b + np.sqrt(self.b**2 + 4 * a * targets))
        rest, slope = targets + a * f * w * w, self.b + 2 * a * f * w
        beyond = 2 * rest / (slope + np.sqrt(slope**2 + 4 * a * (1.0 - f) * rest))
        return np.asarray(np.where(within <= w, within, beyond))

    def shard_cost(self, shard: Shard, length: int) -> float:
        """Return the cost of a shard of a sequence of ``length`` tokens; linear work counts the shard's own tokens."""
        return self.attention_cost(length, len(shard.ring)) + self.linear_cost(shard.num_tokens)

    def micro_batch_cost(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> float:
        """Return the cost of a micro-batch on its rank; ``lengths`` are the plan's."""
        return self.g + sum(self.shard_cost(shard, lengths[shard.seq]) for shard in micro_batch.shards)

    def rank_cost(self, shards: RankShards, lengths: Sequence[int]) -> float:
        """Return the cost of all micro-batches of a rank; ``lengths`` are the plan's."""
        own = np.array([lengths[seq] for seq in shards.seqs.tolist()], dtype=np.float64)
        attention = self.attention_cost(own, shards.widths.astype(np.float64))
        linear = self.linear_cost(int(shards.tokens.sum()))
        return self.g * shards.num_micro_batches + float(attention.sum()) + linear

    def floor(self) -> CostModel:
        """Return a cost that no ring of this one undercuts, and of which d times a ring's cost never falls with d.

        Where rings have inner rings, it has ``FEWEST_HOPS (d - 1)`` hops, else d - 1.
        """
        nests = self.nodes is not None and self.nodes.hierarchical
        return replace(self, c=self.c * (FEWEST_HOPS if nests else 1.0), nodes=None)

    def scaled(self, factor: float) -> CostModel:
        """Return the same model in another unit, or of ``factor`` layers."""
        constants = (self.a * factor, self.b * factor, self.c * factor, self.g * factor, self.h * factor)
        more = self.m * factor, self.e * factor
        return CostModel(*constants, self.nodes, self.window, self.window_share, *more)

    def __add__(self, other: CostModel) -> CostModel:
        """Return the cost of both together; the sum of their exchanges hides behind the sum of their computing."""
        constants = (self.a + other.a, self.b + other.b, self.c + other.c, self.g + other.g, self.h + other.h)
        more = self.m + other.m, self.e + other.e
        return CostModel(*constants, self.nodes, self.window, self.window_share, *more)


@dataclass(frozen=True, slots=True)
class StageCost:
    """Forward and backward cost of one pipeline stage, or of a whole model without pipelines.

    Attributes:
        forward, backward: of all its layers.
        key_read: of copying a token's keys and values in all its layers between the device and host memory, one way;
            hidden behind all other work.
    """

    forward: CostModel
    backward: CostModel
    key_read: float = 0.0

    @property
    def both(self) -> CostModel:
        """Forward and backward together: the cost that planners balance."""
        return self.forward + self.backward

    def on(self, nodes: Nodes | None) -> StageCost:
        """Return the cost with links between these nodes."""
        forward, backward = (replace(one, nodes=nodes) for one in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def with_linear(self, factor: float) -> StageCost:
        """Return the cost with ``factor`` times the work that is linear in tokens."""
        forward, backward = (replace(one, b=one.b * factor) for one in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def with_padding(self, num_rows: float) -> StageCost:
        """Return the cost where each micro-batch, or slice, has so many rows of padding: linear work, no attention."""
        forward, backward = (replace(one, g=one.g + one.b * num_rows) for one in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def floor(self) -> StageCost:
        """Return ``CostModel.floor`` of both."""
        return StageCost(self.forward.floor(), self.backward.floor())
