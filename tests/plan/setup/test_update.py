from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.setup.costs import byte_seconds
from bytescale_ext.plan.setup.memory import Parameters
from bytescale_ext.plan.setup.update import UpdateTime, update_of
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.search.tasks import COST, SHAPE

KEY_BYTES = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2


def test_what_passes_do_not_hide() -> None:
    update = UpdateTime(reduce=5.0, gather=3.0, optimizer=0.5)
    assert update.exposed(first_forward=1.0, last_backward=4.5) == 0.5 + 2.0 + 0.5
    assert update.exposed(first_forward=9.0, last_backward=9.0) == 0.5


def test_a_shared_optimizer_reduces_half_as_much_and_gathers_parameters() -> None:
    cluster, parameters = Cluster(4, 1024), 1e6
    byte = COST.forward.c / KEY_BYTES
    shared, whole = (update_of(COST, Parameters(parameters, num_ranks=4), cluster, shares) for shares in (True, False))
    assert shared.reduce == pytest.approx(0.75 * 4 * parameters * byte)
    assert shared.gather == pytest.approx(0.75 * 2 * parameters * byte)
    assert whole.reduce == pytest.approx(2 * shared.reduce)
    assert whole.gather == 0.0
    assert whole.optimizer == pytest.approx(parameters * 30 / 3.3e12)
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
    assert both.state_bytes(2, False) == 4e6 * 18
    assert both.state_bytes(2, True) == pytest.approx(3e6 * (6 + 12 / 8) + 1e6 * (6 + 12 / 4))
