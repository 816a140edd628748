"""Rings over several nodes: the number of their inner rings, and the time of their exchange.

Times are in hops. One hop is the time that a rank takes to receive a share of keys from a rank of its own node.
``attention/layouts/route.py`` draws the two forms of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

FEWEST_HOPS: Final = 0.75
"""The least hops of a ring over d ranks in any form, as a share of d - 1.

Inner rings of two ranks have the fewest hops: in each round, one hop inside nodes and at least half a hop between them.
"""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster with n ranks each. Node i has the ranks ``i n .. i n + n - 1``.

    Attributes:
        ranks: n, the ranks of a node.
        slowdown: time to receive a byte from another node, relative to a byte from the own node.
        hierarchical: whether rings may consist of inner rings; if not, all rings are plain.
    """

    ranks: int
    slowdown: float
    hierarchical: bool = True

    def cross_nodes(self, firsts: Ints, widths: Ints) -> Bools:
        """Return whether rings of ``widths`` ranks from ``firsts`` on have ranks of several nodes: [n] each."""
        return np.asarray(firsts % self.ranks + widths > self.ranks)

    def inner_rings(self, firsts: Ints, widths: Ints) -> Ints:
        """Return the number of inner rings of each ring, or 1 if the ring must be plain: [n], as the arguments.

        Inner rings tile the nodes, so their width divides the ranks of a node, the first rank and the width of the
        ring. The greatest common divisor is the widest. Inner rings of one rank would be a plain ring.
        """
        inner = np.gcd(np.gcd(self.ranks, firsts), widths)
        is_possible = self.cross_nodes(firsts, widths) & (inner > 1) & self.hierarchical
        return np.asarray(np.where(is_possible, widths // inner, 1))

    def hops(self, firsts: Ints, widths: Ints, inner_rings: Ints) -> Floats:
        """Return the time of each ring's exchange, in hops: [n], as the arguments.

        A plain ring over several nodes is as slow as the links between them. A hierarchical ring of R inner rings of n
        ranks sends 1 / n of a share between nodes in each step of a round, except in the last round::

            (R - 1) ((n - 1) max(1, slowdown / n) + slowdown / n) + n - 1
        """
        plain = np.where(self.cross_nodes(firsts, widths), self.slowdown, 1.0) * (widths - 1)
        inner = widths / inner_rings
        part = self.slowdown / inner
        nested = (inner_rings - 1) * ((inner - 1) * np.maximum(1.0, part) + part) + inner - 1
        return np.asarray(np.where(inner_rings > 1, nested, plain), dtype=np.float64)

    def best_hops(self, widths: Floats) -> Floats:
        """Return ``hops`` of rings in their faster form: [n], as ``widths``.

        Rings begin at the first rank of a node, as planners place wide rings.
        """
        if widths.max(initial=0) <= self.ranks:  # no ring leaves its node
            return widths - 1.0
        ranks = widths.astype(np.int64)
        firsts = np.zeros_like(ranks)
        forms = (np.ones_like(ranks), self.inner_rings(firsts, ranks))
        return np.minimum(*(self.hops(firsts, ranks, form) for form in forms))


@cache
def best_hops_of(nodes: Nodes, width: int) -> float:
    """Return ``Nodes.best_hops`` of one ring. Planners ask for the same widths many thousand times."""
    return float(nodes.best_hops(np.array([float(width)]))[0])
