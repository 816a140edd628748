"""Costs that planners balance: the costs of the run, with padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.hdp.test_planner import KINDS, STAGE, varied


@pytest.mark.slow
def test_the_mean_padding_counts_as_a_cost_of_each_micro_batch() -> None:
    """Padding to 64 rows gives the plans of micro-batches that cost 31.5 tokens more.

    Padding to 1 row changes nothing.
    """
    lengths = np.random.default_rng(7).integers(1, 600, 300).tolist()
    base = HdpPlanner(Cluster(16, 2048), (STAGE,), tokens_multiple=64)
    for kind in KINDS:
        padded = varied(base, **kind)
        share = 31.5 / padded.slicing.num_slices
        dearer = replace(padded, tokens_multiple=1, stages=tuple(stage.with_padding(share) for stage in padded.stages))
        assert padded(lengths).digest() == dearer(lengths).digest(), kind
        check_step_plan(padded(lengths), lengths, 64)


@pytest.mark.parametrize("balance", ["dp", "pp"])
@pytest.mark.slow
def test_planners_count_expanded_latents_as_keys_that_are_received(balance: str) -> None:
    lengths = [30000, 9000, *[500] * 40]
    base = HdpPlanner(Cluster(16, 4096), (STAGE,), balance=balance)
    plans = {}
    for name in ("h", "e"):
        stage = StageCost(replace(STAGE.forward, **{name: 5e-4}), replace(STAGE.backward, **{name: 1.5e-3}))
        plans[name] = replace(base, stages=(stage,))(lengths)
        check_step_plan(plans[name], lengths)
    assert plans["e"].digest() == plans["h"].digest() != base(lengths).digest()
