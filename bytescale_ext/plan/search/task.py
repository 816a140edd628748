"""Input of a search: the model with its costs, the cluster, and the documents of some steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost
from bytescale_ext.plan.memory.model_states import FUSED_ADAM, StateSizes
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.setup.messages import device_grid
from bytescale_ext.plan.step.sizes import Cluster


class DoesNotFit(ValueError):
    """A strategy does not fit the task.

    Attributes:
        needed_bytes: device memory that would be enough; 0 if it is unknown or memory is not the reason.
    """

    def __init__(self, reason: str, needed_bytes: float = 0.0) -> None:
        super().__init__(reason)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class Devices:
    """The cluster.

    Attributes:
        count: number of devices.
        per_node: number of devices of a node.
        memory_bytes: whole memory of a device.
        host_bytes: host memory of each process, for activations or keys.
        link_bytes_per_second: speed between a device and host memory, in one direction.
        speeds: speed of each device, node by node, relative to a device that takes the seconds of the costs; empty: all
            are 1.

    Raises:
        ValueError: the number of speeds is not the number of devices, or a speed is not positive.
    """

    count: int
    per_node: int
    memory_bytes: float
    host_bytes: float = 0.0
    link_bytes_per_second: float = LINK_BYTES_PER_SECOND
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.speeds and (len(self.speeds) != self.count or not all(0 < one < math.inf for one in self.speeds)):
            raise ValueError(f"{len(self.speeds)} speeds: give {self.count} positive numbers, one for each device")

    def rank_speeds(self, num_stages: int, tensor_parallel: int) -> tuple[float, ...]:
        """Return the speed of the slowest device of each HDP rank; empty: all are 1.

        The stages of a pipeline are as far apart as possible (``device_grid``), so slow nodes at the end run the last
        stages.
        """
        if all(speed == 1.0 for speed in self.speeds):
            return ()
        devices = device_grid(len(self.speeds) // (num_stages * tensor_parallel), num_stages, tensor_parallel)
        return tuple(np.array(self.speeds)[devices].min(axis=(1, 2)).tolist())


@dataclass(frozen=True)
class Task:
    """Task of a search.

    Attributes:
        cost: costs of the model, on any number of tensor-parallel ranks.
        devices: the cluster.
        context: largest number of tokens of a document.
        steps: lengths of the documents of some steps, equally many in each.
        operators: operators of a layer.
        rows_multiple: multiple of rows in matrix products on one rank.
        ties_embeddings: whether input and output embedding of the model are one matrix.
        state_sizes: bytes of the model states of a parameter.
    """

    cost: ModelCost
    devices: Devices
    context: int
    steps: tuple[tuple[int, ...], ...]
    operators: LayerOperators = FUSED
    rows_multiple: int = 1
    ties_embeddings: bool = False
    state_sizes: StateSizes = FUSED_ADAM

    @property
    def batch(self) -> int:
        """Number of documents of a step."""
        return len(self.steps[0])


def cluster_of(task: Task, strategy: Strategy) -> Cluster:
    """Return the HDP ranks of a strategy.

    A node has as many HDP ranks as groups of tensor-parallel ranks, if these groups fill the node and the ranks.

    Raises:
        Unfit: devices, documents or experts are not a multiple of the ranks, or the longest document needs more ranks.
    """
    devices = task.devices
    num_ranks, rest = divmod(devices.count, strategy.model_ranks)
    if rest or not num_ranks:
        raise DoesNotFit("ranks")
    if task.batch % num_ranks:
        raise DoesNotFit("documents")
    if task.context > num_ranks * strategy.tokens_per_rank:
        raise DoesNotFit("context")
    if num_ranks % strategy.expert_parallel:
        raise DoesNotFit("experts")
    of_node, rest = divmod(devices.per_node, strategy.tensor_parallel)
    fills = of_node and not rest and of_node < num_ranks and not num_ranks % of_node
    speeds = devices.rank_speeds(strategy.num_stages, strategy.tensor_parallel)
    return Cluster(num_ranks, strategy.tokens_per_rank, of_node if fills else None, speeds=speeds)
