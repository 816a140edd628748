"""The form of each ring of a placement: plain, or of inner rings inside nodes (``plan.cost.nodes``)."""

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

_GAIN = 1e-6  # a ring stays plain unless its inner rings save this share of its time


def with_forms(placed: PlacedRanks, stage: StageCost, cluster: Cluster, slicing: Slicing) -> PlacedRanks:
    """Return the placement with the faster form of each ring; ties are plain.

    Sequences that share a ring in one micro-batch travel together, so they get one form. Whether exchange takes long
    depends on the sequence: where attention hides it in both forms, the ring stays plain, which takes fewer messages
    and less memory. The cluster may ask for inner rings wherever they are possible instead.
    """
    always = cluster.hierarchical_rings == "always" and cluster.ranks_per_node is not None
    nodes = Nodes(cluster.node_ranks, 1.0) if always else stage.forward.nodes
    if nodes is None:
        return placed
    forms = nodes.inner_rings(placed.first_ranks, placed.widths)
    rings = np.flatnonzero(forms > 1)
    if not always:
        rings = rings[_saves(placed, rings, forms, stage, slicing)]
    if not len(rings):
        return placed
    chosen = np.ones_like(forms)
    chosen[rings] = forms[rings]
    return replace(placed, inner_rings=chosen)


def _saves(placed: PlacedRanks, rings: Ints, forms: Ints, stage: StageCost, slicing: Slicing) -> npt.NDArray[np.bool_]:
    """Return whether ``forms`` inner rings are faster than a plain ring: [rings].

    ``rings``: sequences on rings that may have inner rings; ``forms``: of all sequences.
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
    together = [np.bincount(passes, weights=seconds) for seconds in (plain, nested)]
    return np.asarray(together[1] < together[0] * (1 - _GAIN))[passes]


def _ring_seconds(lengths: Floats, widths: Floats, hops: Floats, stage: StageCost, slicing: Slicing) -> Floats:
    """Return the time of all slices of sequences on rings whose exchange takes ``hops``: [n], as the arguments."""
    (forward, _), (backward, _) = SliceShares.of(stage.both, lengths, widths, slicing, hops).stage_costs(stage)
    return np.asarray((forward + backward).sum(axis=1))
