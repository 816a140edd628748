"""Cost of stages, and the stage that planners balance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import expert_share, with_score_products, with_second_forward
from bytescale_ext.plan.schedule.slices import layer_cost
from bytescale_ext.plan.search.costed import setup_of_strategy
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.setup.costs import (
    byte_seconds,
    cost_of_file,
    cost_source,
    equal_cost,
    exchange_seconds,
    slowest_stage,
    with_expert_exchange,
)
from bytescale_ext.plan.setup.layers import expert_load
from bytescale_ext.plan.setup.memory import stage_memory
from bytescale_ext.plan.setup.setup import Mesh
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from tests.config.runs import SHAPE, hdp_of, run_of
from tests.plan.search.tasks import COST, SPARSE, small_task

CLUSTER = Cluster(8, 1024, 4)


def stage_cost(run: RunConfig) -> StageCost:
    return slowest_stage(run.decision.setup)[1]


def test_the_slowest_stage_is_named() -> None:
    hdp, shape = hdp_of(num_stages=2, balance="pp"), replace(SHAPE, num_layers=8)
    assert slowest_stage(run_of(shape=shape).decision.setup)[0] == 0
    assert slowest_stage(run_of(hdp, shape=shape, stage_layers=(7, 1)).decision.setup)[0] == 0
    assert slowest_stage(run_of(hdp, shape=shape, stage_layers=(1, 7)).decision.setup)[0] == 1


def test_costs_are_of_the_slowest_stage() -> None:
    """The slowest stage is the last stage with its head, unless another stage has many more layers."""
    hdp, shape = hdp_of(num_stages=2, balance="pp"), replace(SHAPE, num_layers=8)
    cost = cost_of_rates(shape, 1e12, 1e12, 1e12)
    for run in (run_of(hdp, shape=shape, cost=cost), run_of(hdp, shape=shape)):  # measured, and not measured
        assert stage_cost(run) == cost.stage(4, has_head=True)
    assert stage_cost(run_of(shape=shape, cost=cost)) == cost.stage(8, has_head=True)
    assert stage_cost(run_of(hdp, shape=shape, cost=cost, stage_layers=(7, 1))) == cost.stage(7)
    assert stage_cost(run_of(hdp, shape=shape, cost=cost, stage_layers=(1, 7))) == cost.stage(7, has_head=True)


def test_slices_have_equal_tokens_or_flops_or_seconds() -> None:
    setup = run_of(cost=cost_of_rates(SHAPE, 1e12, 1e12, 1e12)).decision.setup
    even, flops, seconds = (
        equal_cost(replace(setup, sequences=replace(setup.sequences, partition=name)))
        for name in ("even", "flops", "time")
    )
    assert even is None
    assert seconds == slowest_stage(setup)[1].both
    assert flops == layer_cost(SHAPE, "flops").both


def test_padded_rows_of_experts_take_time_and_memory() -> None:
    """In FP8 each of a rank's experts has up to 15 rows more; on average half of it."""
    sizes = {"num_expert_layers": 4, "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 1024}
    shape = replace(SHAPE, num_layers=4, **sizes)
    setup = run_of(shape=shape).decision.setup
    padded = replace(setup, numerics=replace(setup.numerics, rows=16))
    assert not setup.expert_padding
    assert padded.expert_padding == 8 * 15
    plain, cost = slowest_stage(setup)[1], slowest_stage(padded)[1]
    for before, after in ((plain.forward, cost.forward), (plain.backward, cost.backward)):
        assert after.g - before.g == pytest.approx(before.b * expert_share(shape, 4) * 8 * 7.5 / 2)
    assert slowest_stage(replace(padded, measured=True)) == slowest_stage(replace(setup, measured=True))
    more = 8 * 15 / (2 * setup.cluster.tokens_per_rank)
    assert expert_load(padded) - expert_load(setup) == pytest.approx(more)
    assert expert_load(padded, Slicing(4)) - expert_load(setup, Slicing(4)) == pytest.approx(4 * more)
    assert stage_memory(padded).layer.activations > stage_memory(setup).layer.activations
    spread = replace(padded, mesh=replace(padded.mesh, expert_parallel=4))
    assert spread.expert_padding == 2 * 15


def test_copies_of_tokens_go_to_experts_and_back() -> None:
    """If two ranks share the experts, half of the tokens stay. A token has two copies of 64 elements of 2 bytes."""
    inside = byte_seconds(COST, Cluster(2, 1024))
    assert exchange_seconds(replace(COST, shape=SPARSE), 2, CLUSTER) == pytest.approx(2 * 2 * 128 * 0.5 * inside)
    slow = replace(COST, shape=SPARSE, slowdown=8.0)
    assert exchange_seconds(slow, 4, CLUSTER) == pytest.approx(2 * 2 * 128 * 0.75 * inside)
    latent = replace(COST, shape=replace(SPARSE, expert_latent=SPARSE.hidden // 4))
    assert exchange_seconds(latent, 2, CLUSTER) == pytest.approx(2 * 2 * 32 * 0.5 * inside)
    assert exchange_seconds(slow, 8, CLUSTER) == pytest.approx(2 * 2 * 128 * 0.875 * 2 * inside)


@pytest.mark.parametrize(("recompute", "exchanges"), [("none", 1), ("block", 1), ("full", 2)])
def test_costs_have_the_exchange_of_experts_and_cost_files_have_not(recompute: str, exchanges: int) -> None:
    sparse, mesh = replace(COST, shape=SPARSE), Mesh((6,), expert_parallel=4)
    found, seconds = with_expert_exchange(sparse, mesh, CLUSTER, recompute), exchange_seconds(sparse, 4, CLUSTER)
    assert (found.forward.b, found.backward.b) == (sparse.forward.b + seconds, sparse.backward.b + exchanges * seconds)
    assert with_expert_exchange(sparse, Mesh((6,)), CLUSTER, recompute) == sparse
    setup = run_of(shape=SHAPE).decision.setup
    setup = replace(
        setup, mesh=mesh, cluster=CLUSTER, cost=found, numerics=replace(setup.numerics, recompute=recompute)
    )
    file, second = cost_of_file(setup), sparse.forward.b if recompute == "full" else 0.0
    assert [file.forward.b, file.backward.b + second] == pytest.approx([sparse.forward.b, sparse.backward.b])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_costs_have_the_products_of_largest_logits_and_cost_files_have_not(recompute: str) -> None:
    """They are one of two products of a forward pass. Recomputed layers measure only in their second forward pass."""
    is_full, half = recompute == "full", COST.forward.a / 2
    twice = with_second_forward(COST, is_full, head=False)
    found = with_score_products(twice, is_full)
    added = (found.forward.a - twice.forward.a, found.backward.a - twice.backward.a)
    assert added == pytest.approx((0.0, half) if is_full else (half, 0.0))
    setup = run_of(shape=SHAPE).decision.setup
    numerics = replace(setup.numerics, recompute=recompute, measures_logits=True)
    file = cost_of_file(replace(setup, cost=found, numerics=numerics))
    assert [file.forward.a, file.backward.a] == pytest.approx([COST.forward.a, COST.backward.a])


def test_a_file_without_costs_of_blocks_is_named() -> None:
    setup = replace(setup_of_strategy(small_task(), Strategy(1, (6,), 1024)), measured=True)
    assert setup.cluster.num_ranks > 1
    note = ", where the blocks of a ring cost nothing: profile again"
    source = f"--cost-file, measured on {COST.device}"
    for costs, told in (({}, note), ({"h": 1e-9}, ""), ({"m": 1e-9}, ""), ({"e": 1e-9}, "")):
        forward = replace(COST.forward, **{"h": 0.0, "m": 0.0, "e": 0.0, **costs})
        cost = replace(COST, forward=forward)
        assert cost_source(replace(setup, cost=cost)) == source + told
    alone = replace(setup, cost=COST, cluster=replace(setup.cluster, num_ranks=1))
    assert cost_source(alone) == source
