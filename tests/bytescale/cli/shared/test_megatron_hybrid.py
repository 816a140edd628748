"""Megatron's own scheduler of hybrid context parallelism, as ``bytescale simulate`` calls it."""

from __future__ import annotations

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.schedulers import NotApplicable, Scenario
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.planner import scenario_of
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.cli.shared.megatron_hybrid import megatron_hybrid

COST = shipped("bytescale_7b")


def scenario(num_ranks: int, num_stages: int = 1) -> Scenario:
    return scenario_of(choose(setup_of_cost(COST, num_stages, Cluster(num_ranks, 8192), 32768)))


def test_megatrons_scheduler_places_every_sample() -> None:
    here = scenario(8)
    lengths = [32768, 20000, 9000, 8192, 4000, 500, 500, 300]
    outcome = megatron_hybrid(lengths, here)
    least = sum(COST.whole().both.sequence_cost(length, 1) for length in lengths) / 8
    assert outcome.makespan > least
    assert outcome.peak_tokens <= 8192


def test_megatrons_scheduler_says_what_it_cannot() -> None:
    with pytest.raises(NotApplicable, match="refuses pipelines"):
        megatron_hybrid([8], scenario(8, 2))
    with pytest.raises(NotApplicable, match="6 ranks are not a power of two"):
        megatron_hybrid([8], scenario(6))
