"""Rings over several nodes: how many inner rings they consist of, and how long their exchange takes.

Times are counted in hops: one hop is the time in which a rank receives a share of keys from a rank of its own node.
``attention/layouts/route.py`` draws the two forms of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

FEWEST_HOPS: Final = 0.75
"""A ring over d ranks takes at least this share of d - 1 hops, in any form.

The fewest are those of inner rings of two ranks: in each round one hop, and at least half a hop between nodes.
"""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster, as rings see them. Node i is the ranks ``i n .. i n + n - 1`` for n ranks of a node.

    Attributes:
        ranks: of a node.
        slowdown: a rank receives a byte from another node in this many times the time from its own node.
        hierarchical: rings may consist of inner rings; otherwise all are plain.
    """

    ranks: int
    slowdown: float
    hierarchical: bool = True

    def crossed(self, firsts: Ints, widths: Ints) -> Bools:
        """Return whether rings of ``widths`` ranks from ``firsts`` on lie in several nodes: [n] each."""
        return np.asarray(firsts % self.ranks + widths > self.ranks)

    def inner_rings(self, firsts: Ints, widths: Ints) -> Ints:
        """Return of how many inner rings rings may consist, 1 where they must be plain: [n], as the arguments.

        Inner rings tile the nodes, so their width divides the ranks of a node, the first rank and the width. The widest
        is the greatest common divisor; inner rings of one rank would be a plain ring.
        """
        inner = np.gcd(np.gcd(self.ranks, firsts), widths)
        may = self.crossed(firsts, widths) & (inner > 1) & self.hierarchical
        return np.asarray(np.where(may, widths // inner, 1))

    def hops(self, firsts: Ints, widths: Ints, inner_rings: Ints) -> Floats:
        """Return the time of a ring's exchange, in hops inside a node: [n], as the arguments.

        A plain ring over several nodes is as slow as the link between them. A hierarchical ring of R inner rings of n
        ranks sends a part of 1 / n of a share between nodes with each step of a round, except in the last round::

            (R - 1) ((n - 1) max(1, slowdown / n) + slowdown / n) + n - 1
        """
        plain = np.where(self.crossed(firsts, widths), self.slowdown, 1.0) * (widths - 1)
        inner = widths / inner_rings
        part = self.slowdown / inner
        nested = (inner_rings - 1) * ((inner - 1) * np.maximum(1.0, part) + part) + inner - 1
        return np.asarray(np.where(inner_rings > 1, nested, plain), dtype=np.float64)

    def best_hops(self, widths: Floats) -> Floats:
        """Return ``hops`` of rings that begin with a node, as planners place wide ones, in their faster form: [n]."""
        if widths.max(initial=0) <= self.ranks:  # no ring leaves its node
            return widths - 1.0
        ranks = widths.astype(np.int64)
        firsts = np.zeros_like(ranks)
        forms = (np.ones_like(ranks), self.inner_rings(firsts, ranks))
        return np.minimum(*(self.hops(firsts, ranks, form) for form in forms))
