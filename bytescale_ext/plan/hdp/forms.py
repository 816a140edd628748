"""The form of each ring of a placement: plain, or hierarchical with inner rings inside nodes (``plan.cost.nodes``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Cluster, Slicing

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MIN_GAIN = 1e-6  # a ring stays plain unless inner rings save this share of its time


def with_ring_forms(placed: PlacedRanks, stage: StageCost, cluster: Cluster, slicing: Slicing) -> PlacedRanks:
    """Return the placement with the faster form of each ring, plain in a tie.

    Sequences that share a ring in one micro-batch travel together, so they get the same form. If attention overlaps
    with the whole exchange in both forms, the ring stays plain, which needs fewer messages and less memory. With
    ``cluster.hierarchical_rings`` "always", every ring that can have inner rings gets them.
    """
    always = cluster.hierarchical_rings == "always" and cluster.ranks_per_node is not None
    nodes = Nodes(cluster.node_ranks, 1.0) if always else stage.forward.nodes
    if nodes is None:
        return placed
    forms = nodes.inner_rings(placed.first_ranks, placed.widths)
    rings = np.flatnonzero(forms > 1)
    if not always:
        rings = rings[_are_faster(placed, rings, forms, stage, slicing)]
    if not len(rings):
        return placed
    chosen = np.ones_like(forms)
    chosen[rings] = forms[rings]
    return replace(placed, inner_rings=chosen)


def _are_faster(
    placed: PlacedRanks, rings: Ints, forms: Ints, stage: StageCost, slicing: Slicing
) -> npt.NDArray[np.bool_]:
    """Return whether inner rings are faster than a plain ring: [rings].

    Args:
        placed: the placement, of n sequences.
        rings: sequences whose rings can have inner rings: [rings].
        forms: number of inner rings of each sequence: [n].
        stage, slicing: the costs.
    """
    nodes = stage.forward.nodes
    assert nodes is not None, f"{stage=}"
    firsts, widths, orders = placed.first_ranks[rings], placed.widths[rings], placed.orders[rings]
    lengths = placed.lengths[rings].astype(np.float64)
    plain, nested = (
        _ring_seconds(lengths, widths.astype(np.float64), nodes.hops(firsts, widths, counts), stage, slicing)
        for counts in (np.ones_like(widths), forms[rings])
    )
    passes = np.unique(np.stack((firsts, widths, orders)), axis=1, return_inverse=True)[1].reshape(-1)
    plain_sums, nested_sums = (np.bincount(passes, weights=seconds) for seconds in (plain, nested))
    return np.asarray(nested_sums < plain_sums * (1 - _MIN_GAIN))[passes]


def _ring_seconds(lengths: Floats, widths: Floats, hops: Floats, stage: StageCost, slicing: Slicing) -> Floats:
    """Return the time of each sequence, all slices, if its ring's exchange takes ``hops``: [n], as the arguments."""
    (forward, _), (backward, _) = SliceShares.of(stage.both, lengths, widths, slicing, hops).stage_costs(stage)
    return np.asarray((forward + backward).sum(axis=1))
