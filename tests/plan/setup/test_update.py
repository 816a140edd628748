from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import FUSED_ADAM, StateSizes, largest_matrix
from bytescale_ext.plan.search.costed import setup_of_strategy
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.costs import byte_seconds
from bytescale_ext.plan.setup.forecast import Forecast
from bytescale_ext.plan.setup.memory import Parameters, parameters, stage_state_bytes, stage_update_bytes
from bytescale_ext.plan.setup.setup import Setup
from bytescale_ext.plan.setup.update import UpdateTime, update_of
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.search.tasks import COST, SHAPE, small_task

KEY_BYTES = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2


def test_what_passes_do_not_hide() -> None:
    update = UpdateTime(reduce=5.0, gather=3.0, optimizer=0.5)
    assert update.exposed(first_forward=1.0, last_backward=4.5) == 0.5 + 2.0 + 0.5
    assert update.exposed(first_forward=9.0, last_backward=9.0) == 0.5


def test_a_shared_optimizer_reduces_half_as_much_and_gathers_parameters() -> None:
    cluster, count = Cluster(4, 1024), 1e6
    byte = COST.forward.c / KEY_BYTES
    shared, whole = (update_of(COST, Parameters(count, num_ranks=4), cluster, shares) for shares in (True, False))
    assert shared.reduce == pytest.approx(0.75 * 4 * count * byte)
    assert shared.gather == pytest.approx(0.75 * 2 * count * byte)
    assert whole.reduce == pytest.approx(2 * shared.reduce)
    assert whole.gather == 0.0
    assert whole.optimizer == pytest.approx(count * 30 / 3.3e12)
    assert shared.optimizer == pytest.approx(whole.optimizer / 4)


def test_ranks_of_a_node_share_the_border() -> None:
    slow = replace(COST, slowdown=6.0)
    inside = COST.forward.c / KEY_BYTES
    assert byte_seconds(slow, Cluster(4, 1024)) == inside
    assert byte_seconds(slow, Cluster(8, 1024, ranks_per_node=4)) == pytest.approx(1.5 * inside)
    assert byte_seconds(slow, Cluster(16, 1024, ranks_per_node=8)) == inside
    without = replace(COST, forward=CostModel(a=1e-9, b=1e-6))
    assert byte_seconds(without, Cluster(4, 1024)) == 1 / COLLECTIVE_BYTES_PER_SECOND


def test_experts_are_reduced_among_the_ranks_that_have_the_same() -> None:
    both = Parameters(3e6, 1e6, expert_holders=4, num_ranks=8)
    assert both.parts == ((3e6, 8), (1e6, 4))
    assert both.count == 4e6
    byte = byte_seconds(COST, Cluster(8, 1024))
    update = update_of(COST, both, Cluster(8, 1024), True)
    assert update.reduce == pytest.approx(4 * (3e6 * 7 / 8 + 1e6 * 3 / 4) * byte)
    assert update.optimizer == pytest.approx((3e6 / 8 + 1e6 / 4) * 30 / 3.3e12)
    assert both.state_bytes(2, FUSED_ADAM, False, 1.0) == 4e6 * 18
    assert both.state_bytes(2, FUSED_ADAM, True, 1.0) == pytest.approx(3e6 * (6 + 12 / 8) + 1e6 * (6 + 12 / 4))


def test_an_optimizer_has_its_own_states() -> None:
    """Muon keeps one moment of a matrix, and Adam's two of an embedding; a quarter of the parameters are in it."""
    muon = StateSizes(gradient=2, moments=4, end_moments=8, update=4)
    both = Parameters(3e6, 1e6, expert_holders=4, num_ranks=8, ends=1e6)
    assert both.state_bytes(2, muon, False, 1.0) == 4e6 * (2 + 2 + 4 + 4) + 1e6 * 4
    assert both.state_bytes(2, muon, True, 0.5) == 4e6 * 4 + 0.5 * ((3e6 / 8 + 1e6 / 4) * 8 + 1e6 / 8 * 4)
    assert both.state_bytes(4, muon, False, 0.0) == 4e6 * 6


def test_the_largest_matrix_is_updated_alone() -> None:
    """The gated MLP of a model, an expert of tensor-parallel parts, or a projection of wide attention."""
    shape = ModelShape(4, 64, 4, 2, 16, 100, True, 128)
    assert largest_matrix(shape) == 64 * 200
    assert largest_matrix(shape, 2) == 64 * 100
    assert largest_matrix(replace(shape, ffn_hidden=10)) == 64 * 64
    experts = replace(shape, num_expert_layers=4, num_experts=8, experts_per_token=2, expert_ffn_hidden=2 * 150)
    assert largest_matrix(experts, 2, 1) == 64 * 300
    assert largest_matrix(replace(experts, num_expert_layers=3, expert_ffn_hidden=2), 2, 1) == 64 * 100
    setup = setup_of_strategy(small_task(), Strategy(1, (3, 3), 1024))
    (alone,) = set(stage_update_bytes(with_sizes(setup, StateSizes(matrix_update=3))))
    assert alone == 3 * largest_matrix(setup.shape)
    ends = parameters(setup)[0].updated_ends(setup.mesh.shares_optimizer)
    both = stage_update_bytes(with_sizes(setup, StateSizes(matrix_update=3, end_update=1e6)))
    assert both[0] == max(alone, 1e6 * ends)


def with_sizes(setup: Setup, sizes: StateSizes) -> Setup:
    return replace(setup, states=replace(setup.states, sizes=sizes))


def test_an_update_that_does_not_fit_is_refused() -> None:
    """The refusal names a budget that is sufficient, and the forecast of a step is at least the update."""
    setup = setup_of_strategy(small_task(), Strategy(1, (3, 3), 1024))
    setup = replace(setup, states=replace(setup.states, sizes=StateSizes(update=4000.0)))
    tight = replace(setup, budget=replace(setup.budget, device_bytes=max(stage_state_bytes(setup)) + 1e6))
    with pytest.raises(ValueError, match=r"update takes .* GB of device memory") as error:
        choose(tight)
    named = re.search(r"takes (\S+) GB", str(error.value))
    assert named is not None
    forecast = Forecast(choose(replace(setup, budget=replace(setup.budget, device_bytes=float(named[1]) * 1e9))))
    stages = zip(stage_state_bytes(setup), stage_update_bytes(setup), strict=True)
    assert forecast.full_bytes[0] == max(states + update for states, update in stages)
