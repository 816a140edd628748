"""Cost of the slices of many sequences (Seq1F1B, Sun et al. 2024, section 3.3, with rings of ByteScale section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.step.sizes import Slicing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SliceShares:
    """The k slices of n sequences, as shares of each whole sequence.

    Attributes:
        lengths, widths: tokens and ranks of each sequence: [n].
        tokens: share of the tokens in each slice: [n, k].
        exchanged: share of the tokens whose keys travel round the ring for each slice: its own tokens if keys are kept,
            otherwise all tokens up to its end: [n, k].
        squares: share of the attention (``CostModel.squares``) in each slice: [n, k].
        kept: whether the keys of each sequence are kept from slice to slice: [n].
        summed: whether the gradient sums of these keys are kept too: [n].
        swapped: whether the keys of each sequence are kept in host memory: [n].
        hops: time of the exchange of each sequence's ring (``Nodes.hops``), [n]; None: ``CostModel.hops``.
    """

    lengths: Floats
    widths: Floats
    tokens: Floats
    exchanged: Floats
    squares: Floats
    kept: npt.NDArray[np.bool_]
    summed: npt.NDArray[np.bool_]
    swapped: npt.NDArray[np.bool_]
    hops: Floats | None = None

    @classmethod
    def of(
        cls, cost: CostModel, lengths: Floats, widths: Floats, slicing: Slicing, hops: Floats | None = None
    ) -> SliceShares:
        """Return slices of equal cost (``CostModel.end_of_share``), not rounded to whole tokens.

        A sequence on one rank is sliced together with the other local sequences of its micro-batch, so it counts as k
        equal parts.

        ``lengths``, ``widths``, ``hops``: tokens, ranks and exchange time of each sequence: [n].
        """
        num_slices = slicing.num_slices
        inner = np.arange(1, num_slices) / num_slices
        kept = (lengths <= slicing.longest_kept) & (num_slices > 1)
        stops = cost.end_of_share(lengths[:, None], inner, np.where(kept, widths, 1)[:, None]) / lengths[:, None]
        ends = np.zeros((len(lengths), num_slices + 1))
        ends[:, -1] = 1.0
        ends[:, 1:-1] = np.where((widths == 1)[:, None], inner, stops)
        work = cost.squares(ends * lengths[:, None]) / cost.squares(lengths)[:, None]
        squares = np.where((widths == 1)[:, None], ends, work)
        tokens = np.diff(ends, axis=1)
        exchanged = np.where(kept[:, None], tokens, ends[:, 1:])
        summed = kept & (lengths <= slicing.summed_tokens)
        swapped = kept & (lengths > slicing.kept_tokens) & (widths > 1)
        return cls(lengths, widths, tokens, exchanged, np.diff(squares, axis=1), kept, summed, swapped, hops)

    @property
    def full_squares(self) -> Floats:
        """Share of the attention in each slice of a ring sequence, in layers without windows: [n, k]."""
        ends = np.cumsum(self.tokens, axis=1)
        return np.asarray(ends**2 - (ends - self.tokens) ** 2)

    def costs(self, cost: CostModel) -> tuple[Floats, Floats]:
        """Return the cost of each slice on each rank of its ring, without ``g``, and its exposed part: [n, k] each.

        The exposed part is exchange that does not overlap with computation.

        A slice of the tokens P to P' attends to all tokens before P'. So the keys of P' tokens travel round the ring of
        d ranks once for it. Linear work counts its own tokens::

            max(a (P'^2 - P^2) / d + (h P' / d + m) (d - 1), c P' (d - 1) / d) + b (P' - P) / d

        If all ranks keep the keys of earlier slices, only the slice's own keys travel: P' - P in place of P'.

        If latents travel, a slice expands the latents of all tokens up to its end, even if they are kept. The first
        expansion of its own latents counts as linear work. Its front rows and its back rows each expand the earlier
        latents of other ranks (``layouts/layout.py``), so these count twice: ``e (P' - (P' - P) / d + P (d - 1) / d)``
        in addition. A sequence on one rank is mostly inside one slice, so nothing is added for it.

        In layers whose window is shorter than the sequence, a slice receives the keys before its tokens
        (``CostModel.window_received``), and this transfer does not overlap.
        """
        return self._costs(cost, self.exchanged)

    def stage_costs(self, stage: StageCost) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Return ``costs`` of the forward and of the backward pass, with copies from and to host memory: [n, k] each.

        If keys are in host memory, the forward pass of a slice reads the keys of earlier slices and writes its own keys
        at the same time, and the backward pass reads both. A copy costs the time that does not overlap with the pass.
        """
        ends = np.cumsum(self.tokens, axis=1)
        forward, backward = self.costs(stage.forward), self._costs(stage.backward, self.backward_exchanged(stage))
        if not self.swapped.any():
            return forward, backward
        copied = (np.maximum(ends - self.tokens, self.tokens), ends)
        seconds = (stage.key_read * self.lengths * self.swapped)[:, None]
        return _with_copies(*forward, seconds * copied[0]), _with_copies(*backward, seconds * copied[1])

    def backward_exchanged(self, stage: StageCost) -> Floats:
        """Return ``exchanged`` of the backward pass: [n, k].

        Kept keys do not travel again, only their gradients do: the gradients of the slice's own keys if ranks keep the
        sums, otherwise of all keys up to its end. The backward ``c`` counts keys and gradients and the forward ``c``
        keys only, so gradients cost the difference.
        """
        share = max(0.0, 1.0 - stage.forward.c / stage.backward.c) if stage.backward.c else 1.0
        sums = np.where(self.summed[:, None], self.tokens, np.cumsum(self.tokens, axis=1))
        return np.where(self.kept[:, None], share * sums, self.exchanged)

    def _costs(self, cost: CostModel, exchanged: Floats) -> tuple[Floats, Floats]:
        lengths, widths = self.lengths, self.widths
        hops = cost.hops(widths) if self.hops is None else self.hops
        attention = (cost.a * cost.squares(lengths) / widths)[:, None] * self.squares
        exchange = (cost.c * lengths * hops / widths)[:, None] * exchanged
        joined = (cost.h * lengths * (widths - 1) / widths)[:, None] * exchanged + cost.m * (widths - 1)[:, None]
        joined += self._expanded(cost)
        if not cost.window_share:
            exposed = np.maximum(exchange - attention - joined, 0.0)
        else:
            share, ends = cost.limited_share(lengths)[:, None], np.cumsum(self.tokens, axis=1)
            hiding = (cost.a * lengths * lengths / widths)[:, None] * self.full_squares
            received = cost.window_received(lengths[:, None] * ends, widths[:, None])
            exposed = (1.0 - share) * np.maximum(exchange - hiding - joined, 0.0) + share * cost.c * received
            joined = (1.0 - share) * joined + share * cost.window_work(received, widths[:, None])
        return attention + exposed + (cost.b * lengths / widths)[:, None] * self.tokens + joined, exposed

    def _expanded(self, cost: CostModel) -> Floats:
        """Return the cost of repeated expansions of latents, in layers without windows: [n, k]."""
        if not cost.e:
            return np.zeros_like(self.tokens)
        ends, widths = np.cumsum(self.tokens, axis=1), self.widths[:, None]
        rows = ends - self.tokens / widths + (ends - self.tokens) * (widths - 1) / widths
        return np.asarray((cost.e * self.lengths * (self.widths > 1))[:, None] * rows)


def _with_copies(costs: Floats, exposed: Floats, copies: Floats) -> tuple[Floats, Floats]:
    """Return costs and their exposed part with copies that overlap with all other work: [n, k], as the arguments."""
    waits = np.maximum(copies - costs, 0.0)
    return costs + waits, exposed + waits
