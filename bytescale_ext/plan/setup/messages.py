"""Time of messages between pipeline stages, from the nodes of the devices that send and receive them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.setup.costs import byte_seconds
from bytescale_ext.plan.setup.setup import Setup
from bytescale_ext.plan.step.sizes import Cluster

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def token_seconds(setup: Setup) -> Floats:
    """Return the seconds that a token adds to a message from each stage to the next: [num_ranks, num_stages].

    The last stage sends to the first, as between model chunks. A gradient takes as long on its way back.
    """
    inside, between = (message_seconds(setup.cost, 1, is_between) for is_between in (False, True))
    return np.where(leaves_node(setup), between, inside)


def leaves_node(setup: Setup) -> Bools:
    """Return whether a message from each stage to the next leaves its node: [num_ranks, num_stages].

    The last stage sends to the first. Each tensor-parallel rank sends to its counterpart; one that leaves counts.
    """
    devices, node = devices_of(setup), setup.mesh.devices_per_node
    if node is None:
        return np.zeros(devices.shape[:2], dtype=np.bool_)
    nodes = devices // node
    return np.asarray((nodes != np.roll(nodes, -1, axis=1)).any(axis=2))


def devices_of(setup: Setup) -> Ints:
    """Return Megatron's rank of each device: [num_ranks, num_stages, tensor_parallel]."""
    mesh = setup.mesh
    return device_grid(setup.cluster.num_ranks, mesh.num_stages, mesh.tensor_parallel, mesh.stages_before_ranks)


def device_grid(num_ranks: int, num_stages: int, tensor_parallel: int, stages_before_ranks: bool = False) -> Ints:
    """Return Megatron's rank of each device of a mesh: [num_ranks, num_stages, tensor_parallel].

    Megatron numbers tensor-parallel ranks, then HDP ranks, then stages; or stages before HDP ranks.
    """
    numbers = np.arange(num_ranks * num_stages * tensor_parallel)
    if stages_before_ranks:
        return numbers.reshape(num_ranks, num_stages, tensor_parallel)
    return numbers.reshape(num_stages, num_ranks, tensor_parallel).swapaxes(0, 1)


def message_seconds(cost: ModelCost, num_tokens: int, is_between_nodes: bool) -> float:
    """Return the seconds of the bytes of one message: the hidden states of a micro-batch on one rank."""
    one_node = Cluster(1, num_tokens)
    slower = cost.slowdown if is_between_nodes else 1.0
    hidden_bytes = cost.shape.hidden * cost.element_bytes / cost.tensor_parallel
    return num_tokens * hidden_bytes * slower * byte_seconds(cost, one_node)
