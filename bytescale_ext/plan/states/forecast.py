"""Forecast of device memory, host memory and copied bytes with paged model states, before a model is built."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import (
    GRADIENT_BYTES,
    MAIN_PARAMETER_BYTES,
    parameter_bytes,
    stage_parameters,
)
from bytescale_ext.plan.states.late import late_bytes
from bytescale_ext.plan.states.moves import StateTraffic, traffic
from bytescale_ext.plan.states.pages import (
    FLOAT_BYTES,
    NUM_BUFFERS,
    NUM_GRADIENT_SLOTS,
    NUM_MOMENTS,
    PageTable,
    StateTensor,
    lay_out,
)
from bytescale_ext.plan.states.tiers import FileLayout, least_host_bytes


@dataclass(frozen=True)
class StateCase:
    """Pipeline stage with its placement of model states, without experts and biases.

    Attributes:
        shape: sizes of the model, with the layers of this stage.
        tensor_parallel: number of ranks that share each layer.
        has_embedding: whether the stage has the embedding.
        has_head: whether the stage has the output layer.
        element_bytes: bytes of a parameter on the device.
        optimizer_ranks: number of ranks that share Adam's states (``--use-distributed-optimizer``).
        page_bytes: bytes of a page.
        stage: states that leave the device: 1 Adam's states, 2 gradients too, 3 parameters of layers too.
        window_layers: layers with parameters on the device at a time, in stage 3.
        update_steps: steps that overlap with an update, or 0.
        node_ranks: processes of a node that share gradients and parameters in host memory.
        update_bytes: device memory of each parameter that a process updates, while resident states are updated.
    """

    shape: ModelShape
    tensor_parallel: int
    has_embedding: bool
    has_head: bool
    element_bytes: int
    optimizer_ranks: int
    page_bytes: int
    stage: int = 1
    window_layers: int = 2
    update_steps: int = 0
    node_ranks: int = 1
    update_bytes: float = 0.0

    @property
    def num_parameters(self) -> float:
        """Number of parameters of one process."""
        return stage_parameters(self.shape, self.tensor_parallel, self.has_embedding, self.has_head)

    @property
    def tensors(self) -> tuple[StateTensor, StateTensor]:
        """Tensors that a process updates: its matrices, and its norms, which have no weight decay."""
        norms = (2 * self.shape.num_layers + self.has_head) * self.shape.hidden
        has_copy = self.element_bytes < MAIN_PARAMETER_BYTES
        matrices, norms = (-int(-size // self.optimizer_ranks) for size in (self.num_parameters - norms, norms))
        return StateTensor("matrices", matrices, 0, has_copy), StateTensor("norms", norms, 1, has_copy)

    @cached_property
    def table(self) -> PageTable:
        """Page table of one process."""
        return lay_out(self.tensors, self.page_bytes)

    @property
    def resident_bytes(self) -> float:
        """Device memory of parameters, gradients and Adam's states if all are resident."""
        return self.num_parameters * parameter_bytes(self.element_bytes, self.optimizer_ranks)

    @property
    def resident_update_bytes(self) -> float:
        """Device memory that the update of resident states takes, when no activations exist."""
        return self.num_parameters * self.update_bytes / self.optimizer_ranks

    @property
    def paged_bytes(self) -> float:
        """Device memory of paged states: parameters (in stage 3 only a window) and, in stage 1, gradients."""
        if self.stage == 3:
            return self._window_parameters * self.element_bytes
        return self.num_parameters * (self.element_bytes + (GRADIENT_BYTES if self.stage == 1 else 0))

    @property
    def _window_parameters(self) -> float:
        """Number of parameters in the window and outside the layers."""
        return self.with_layers(min(self.window_layers, self.shape.num_layers)).num_parameters

    @property
    def _num_pages(self) -> int:
        """Number of pages of a plane, without building a page table."""
        return sum(-(-tensor.num_elements * FLOAT_BYTES // self.page_bytes) for tensor in self.tensors)

    @property
    def whole_host_bytes(self) -> int:
        """Host memory in addition to pages: gradients, their slots, parameters and the buffers of late updates."""
        pages = self._num_pages
        late = late_bytes(pages, pages * self.tensors[0].has_copy, self.page_bytes, self.update_steps)
        if self.stage == 1:
            return late
        each = GRADIENT_BYTES + (self.element_bytes if self.stage == 3 else 0)
        return int(self.num_parameters * each / self.node_ranks) + NUM_GRADIENT_SLOTS * self.page_bytes + late

    @property
    def host_bytes(self) -> int:
        """Host memory of one process without pages on a disk."""
        planes = NUM_MOMENTS + self.tensors[0].has_copy
        return (planes * self._num_pages + 2 * NUM_BUFFERS) * self.page_bytes + self.whole_host_bytes

    @property
    def least_host_bytes(self) -> int:
        """Host memory of one process with all pages on a disk."""
        return least_host_bytes(self.page_bytes, self.tensors[0].has_copy) + self.whole_host_bytes

    @property
    def file_bytes(self) -> int:
        """Disk space of one process with pages on a disk."""
        pages = self._num_pages
        return FileLayout(pages, pages * self.tensors[0].has_copy, self.page_bytes).num_bytes

    def traffic(self, on_disk: Collection[int] = ()) -> StateTraffic:
        """Return the bytes that a process copies in a step. ``on_disk``: its pages on a disk."""
        return traffic(self.table, self.element_bytes, on_disk)

    def link_bytes(self, micro_batches: int) -> StateTraffic:
        """Return the bytes copied between device and host in a step, without recomputation.

        From stage 2 on, gradients are copied to host memory in the type of their parameters, once for each micro-batch.
        In stage 3, the parameters of a layer are copied to the device before each forward and backward pass. Gradient
        sums that ranks communicate also pass through the device, but are not counted.
        """
        if self.stage == 1:
            return self.traffic()
        fetched = int(self.num_parameters * self.element_bytes) * micro_batches
        if self.stage == 2:
            return StateTraffic(fetched, self.traffic().returned)
        ends = self.with_layers(0).num_parameters
        passes = 2 * micro_batches * (self.num_parameters - ends) + ends
        return StateTraffic(fetched, int(passes * self.element_bytes))

    @property
    def build_bytes(self) -> float:
        """Device memory that Megatron needs to build the model: parameters and, in stage 1, gradients.

        Ranks that share the optimizer store parameters twice during the build, because DDP copies them to a buffer.
        """
        buffers = GRADIENT_BYTES + (self.element_bytes if self.optimizer_ranks > 1 else 0)
        return self.num_parameters * (self.element_bytes + (buffers if self.stage == 1 else 0))

    def with_layers(self, num_layers: int) -> StateCase:
        """Return this case with another number of layers."""
        return replace(self, shape=replace(self.shape, num_layers=num_layers))


class Tier(IntEnum):
    """Slowest kind of memory that stores states."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one process for model states, in bytes."""

    device_bytes: float
    host_bytes: float
    disk_bytes: float = 0.0

    def holds(self, case: StateCase, tier: Tier) -> bool:
        """Return whether the states fit in this tier and the faster tiers together."""
        if tier is Tier.DEVICE:
            return case.resident_bytes <= self.device_bytes
        if max(case.paged_bytes, case.build_bytes) > self.device_bytes:
            return False
        if case.host_bytes <= self.host_bytes:
            return True
        return tier is Tier.DISK and case.least_host_bytes <= self.host_bytes and case.file_bytes <= self.disk_bytes


def most_layers(case: StateCase, room: Room, tier: Tier) -> int:
    """Return the largest number of layers of this width whose states fit; 0 if a single layer does not fit."""
    low, high = 0, 1
    while room.holds(case.with_layers(high), tier):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if room.holds(case.with_layers(middle), tier) else (low, middle)
    return low
