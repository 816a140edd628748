"""Links of the messages between pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.setup.messages import leaves_node, message_seconds, token_seconds
from bytescale_ext.plan.setup.setup import Setup, setup_of_cost
from bytescale_ext.plan.step.sizes import Cluster
from tests.plan.search.tasks import COST


def pipelines(num_ranks: int, num_stages: int, devices_per_node: int | None, **mesh: int) -> Setup:
    """Return the setup of pipelines on nodes; ``mesh``: other fields of its mesh."""
    setup = setup_of_cost(replace(COST, slowdown=4.0), 1, Cluster(num_ranks, 1024))
    return replace(
        setup, mesh=replace(setup.mesh, stage_layers=(1,) * num_stages, devices_per_node=devices_per_node, **mesh)
    )


@pytest.mark.parametrize(
    ("setup", "leaves"),
    [
        (pipelines(4, 4, 8), [[0, 1, 0, 1]] * 4),  # two stages on each node
        (pipelines(4, 4, 4), [[1, 1, 1, 1]] * 4),  # a stage on each node
        (pipelines(4, 4, 16), [[0, 0, 0, 0]] * 4),
        (pipelines(4, 4, None), [[0, 0, 0, 0]] * 4),
        (pipelines(2, 4, 8, tensor_parallel=2), [[0, 1, 0, 1]] * 2),
        (pipelines(3, 2, 4), [[0, 0], [1, 1], [1, 1]]),  # devices 0 and 3, 1 and 4, 2 and 5
        (pipelines(2, 2, 4, tensor_parallel=3), [[1, 1], [1, 1]]),  # the message of one tensor-parallel rank leaves
        (pipelines(4, 4, 4, stages_before_ranks=True), [[0, 0, 0, 0]] * 4),  # a pipeline on each node
        (pipelines(4, 1, 2), [[0]] * 4),
    ],
)
def test_messages_leave_a_node_where_stages_are_on_other_nodes(setup: Setup, leaves: list[list[int]]) -> None:
    assert leaves_node(setup).astype(int).tolist() == leaves


def test_only_messages_that_leave_a_node_are_slower() -> None:
    setup = pipelines(4, 4, 8)
    inside, between, _, _ = token_seconds(setup)[0].tolist()
    assert inside == message_seconds(setup.cost, 1, is_between_nodes=False)
    assert between == pytest.approx(4.0 * inside)
