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
    """How n sequences are cut into k slices, as shares of each whole sequence.

    Attributes:
        lengths, widths: tokens and ranks of each sequence: [n].
        tokens: tokens of each slice: [n, k].
        exchanged: tokens whose keys travel round the ring for the slice: its own where keys are kept, else all up to
            its end: [n, k].
        squares: attention of the slice (``CostModel.squares``): [n, k].
        kept: whether the keys of the sequence are kept from slice to slice: [n].
        summed: whether the sums of their gradients are too: [n].
        swapped: whether its keys are kept in host memory: [n].
        hops: time of the exchange (``Nodes.hops``), [n]; None: as ``CostModel.hops`` says.
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
        """Cut sequences, [n] each, into slices of equal cost (``CostModel.end_of_share``), not rounded to whole tokens.

        A sequence on one rank is cut together with the others of its micro-batch, so it counts as k equal parts.
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
        """Attention of each slice in layers without windows, of sequences of rings: [n, k]."""
        ends = np.cumsum(self.tokens, axis=1)
        return np.asarray(ends**2 - (ends - self.tokens) ** 2)

    def costs(self, cost: CostModel) -> tuple[Floats, Floats]:
        """Return the forward cost of each slice on each rank of its ring, without ``g``: [n, k].

        A slice attends to all tokens before it, so on d ranks the keys of the tokens up to its end P' travel round
        once for it; linear work is that of its own tokens::

            max(a (P'^2 - P^2) / d + (h P' / d + m) (d - 1), c P' (d - 1) / d) + b (P' - P) / d

        Where all ranks keep the keys of earlier slices, only the slice's own keys travel: P' - P instead of P'.

        Where keys are made from latents, a slice expands the latents of all tokens up to its end, even if keys are
        kept. Expanding its own counts as linear work.
        Its front rows and its back rows take the earlier ones of other ranks by themselves (``layouts/layout.py``), so
        these count twice: ``e (P' - (P' - P) / d + P (d - 1) / d)`` more. A sequence on one rank is mostly within a
        slice, so there nothing is added.

        Layers in which a window limits the sequence receive the keys before each slice's tokens instead
        (``CostModel.window_received``), and these do not hide.

        The second result is the part of the cost that is exchange not hidden behind computing: [n, k].
        """
        return self._costs(cost, self.exchanged)

    def stage_costs(self, stage: StageCost) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Return ``costs`` of the forward and of the backward pass: [n, k] each, with copies that nothing hides.

        Where keys are in host memory, the forward pass of a slice reads those of earlier slices and writes its own at
        the same time, and the backward pass reads both.
        """
        ends = np.cumsum(self.tokens, axis=1)
        forward, backward = self.costs(stage.forward), self._costs(stage.backward, self.backward_exchanged(stage))
        if not self.swapped.any():
            return forward, backward
        copied = (np.maximum(ends - self.tokens, self.tokens), ends)
        seconds = (stage.key_read * self.lengths * self.swapped)[:, None]
        (first, exposed), (second, more_exposed) = forward, backward
        waits = [np.maximum(seconds * each - costs, 0.0) for each, costs in zip(copied, (first, second), strict=True)]
        return (first + waits[0], exposed + waits[0]), (second + waits[1], more_exposed + waits[1])

    def backward_exchanged(self, stage: StageCost) -> Floats:
        """Return ``exchanged`` of the backward pass: [n, k].

        Kept keys do not travel again, only their gradients do. Where ranks keep the sums, these are the gradients of
        the slice's own keys, else those of all keys up to its end. The backward ``c`` covers keys and gradients, the
        forward ``c`` keys alone; so gradients alone cost the difference.
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
        """Return the cost of expanding latents besides a slice's own, in layers without windows: [n, k]."""
        if not cost.e:
            return np.zeros_like(self.tokens)
        ends, widths = np.cumsum(self.tokens, axis=1), self.widths[:, None]
        rows = ends - self.tokens / widths + (ends - self.tokens) * (widths - 1) / widths
        return np.asarray((cost.e * self.lengths * (self.widths > 1))[:, None] * rows)
