"""The time of what a step does once for each parameter: reduce gradients, update, gather parameters."""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.activation.load import COLLECTIVE_BYTES_PER_SECOND, MEMORY_BYTES_PER_SECOND
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.memory.model_states import GRADIENT_BYTES, MAIN_PARAMETER_BYTES, MOMENT_BYTES
from bytescale_ext.plan.step.sizes import Cluster


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds of one process.

    Attributes:
        reduce: of the gradients, beside the last backward pass.
        gather: of the parameters, beside the first forward pass.
        optimizer: beside nothing.
    """

    reduce: float
    gather: float
    optimizer: float

    def exposed(self, first_forward: float, last_backward: float) -> float:
        """Return what these passes do not hide."""
        return max(0.0, self.reduce - last_backward) + max(0.0, self.gather - first_forward) + self.optimizer


def update_of(cost: ModelCost, parameters: float, cluster: Cluster, shares_optimizer: bool) -> Update:
    """Return the update of a process with this many parameters.

    A rank receives ``(D - 1) / D`` of the gradients in a reduce-scatter, and as many parameters in an all-gather; an
    all-reduce is both, of gradients (Rajbhandari et al. 2020, section 7.1). Adam reads and writes a float32 copy, two
    moments, the gradient and the parameter at ``MEMORY_BYTES_PER_SECOND``.
    """
    element, ranks = cost.element_bytes, cluster.num_ranks
    received = parameters * (1 - 1 / ranks) * byte_seconds(cost, cluster)
    touched = 2 * (MAIN_PARAMETER_BYTES + MOMENT_BYTES) + GRADIENT_BYTES + element
    of_rank = parameters / ranks if shares_optimizer else parameters
    return Update(
        reduce=received * (GRADIENT_BYTES if shares_optimizer else 2 * GRADIENT_BYTES),
        gather=received * element if shares_optimizer else 0.0,
        optimizer=of_rank * touched / MEMORY_BYTES_PER_SECOND,
    )


def byte_seconds(cost: ModelCost, cluster: Cluster) -> float:
    """Return the seconds in which a rank receives a byte from the HDP ranks, all links of a node at work.

    Inside a node it is the cost file's exchange of keys, or ``COLLECTIVE_BYTES_PER_SECOND``. Between nodes, n ranks of
    a node share the border as in hierarchical rings (``Nodes.hops``): ``slowdown / n`` times as long, if that is more.
    """
    keys = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes)
    inside = cost.forward.c / keys or 1.0 / COLLECTIVE_BYTES_PER_SECOND
    if cluster.node_ranks == cluster.num_ranks:
        return inside
    return inside * max(1.0, cost.slowdown / cluster.node_ranks)


def message_seconds(cost: ModelCost, num_tokens: int, is_between_nodes: bool) -> float:
    """Return the time of one message between pipeline stages: the hidden states of a micro-batch on one rank."""
    one_node = Cluster(1, num_tokens)
    slower = cost.slowdown if is_between_nodes else 1.0
    hidden_bytes = cost.shape.hidden * cost.element_bytes / cost.tensor_parallel
    return num_tokens * hidden_bytes * slower * byte_seconds(cost, one_node)
