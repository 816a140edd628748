"""Time of the update of a step: reduce gradients, run the optimizer, gather parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.activation.load import MEMORY_BYTES_PER_SECOND
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.replay import StageReplay
from bytescale_ext.plan.memory.model_states import FUSED_ADAM, MAIN_PARAMETER_BYTES, StateSizes
from bytescale_ext.plan.schedule.actions import BACKWARD, FORWARD
from bytescale_ext.plan.setup.costs import byte_seconds
from bytescale_ext.plan.setup.memory import Parameters
from bytescale_ext.plan.step.sizes import Cluster


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Seconds of the update of one process.

    Attributes:
        reduce: seconds to reduce gradients, which overlap with the last backward pass.
        gather: seconds to gather parameters, which overlap with the first forward pass.
        optimizer: seconds of the optimizer, which do not overlap.
    """

    reduce: float
    gather: float
    optimizer: float

    def exposed(self, first_forward: float, last_backward: float) -> float:
        """Return the seconds that do not overlap with these passes."""
        return max(0.0, self.reduce - last_backward) + max(0.0, self.gather - first_forward) + self.optimizer


def update_of(
    cost: ModelCost, parameters: Parameters, cluster: Cluster, shares_optimizer: bool, sizes: StateSizes = FUSED_ADAM
) -> UpdateTime:
    """Return the update of a process with these parameters.

    A rank receives ``(D - 1) / D`` of the gradients in a reduce-scatter, and as many parameters in an all-gather; an
    all-reduce is both, of gradients (Rajbhandari et al. 2020, section 7.1). The optimizer reads and writes a float32
    copy, moments, the gradient and the parameter at ``MEMORY_BYTES_PER_SECOND``.
    """
    element, parts = cost.element_bytes, parameters.parts
    received = sum(count * (1 - 1 / ranks) for count, ranks in parts) * byte_seconds(cost, cluster)
    touched = 2 * (MAIN_PARAMETER_BYTES + sizes.moments) + sizes.gradient + element
    return UpdateTime(
        reduce=received * (sizes.gradient if shares_optimizer else 2 * sizes.gradient),
        gather=received * element if shares_optimizer else 0.0,
        optimizer=parameters.updated(shares_optimizer) * touched / MEMORY_BYTES_PER_SECOND,
    )


def end_passes(result: StageReplay, num_slices: int) -> tuple[float, float]:
    """Return the shortest first forward pass and last backward pass of any pipeline on one stage, in seconds."""
    each = result.own_seconds.reshape(-1, num_slices, *result.own_seconds.shape[1:]).sum(axis=1)
    of_stages = each.sum(axis=2) / result.num_stages
    stops = np.cumsum(result.counts)
    return float(of_stages[stops - result.counts, FORWARD].min()), float(of_stages[stops - 1, BACKWARD].min())
