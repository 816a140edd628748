"""Time of a training step with resident or paged model states: micro-batches under an activation plan, and the update.

Paged states lengthen a layer's passes only if their copies take longer than computing:

    forward     max(computing, parameters to the device)                                    stage 3
    backward    max(computing, parameters, gradients to the host, their sums in host memory)    stages 2 and 3

With a window of a single layer, copies of parameters overlap with nothing. In the backward pass they take a share of
the link from activations. So the policy plans activations for these loads and the rest of the link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from bytescale_ext.plan.activation.load import LayerLoad
from bytescale_ext.plan.memory.model_states import GRADIENT_BYTES, MAIN_PARAMETER_BYTES, MOMENT_BYTES
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.tiers import spread
from bytescale_ext.plan.states.timeline import Speeds, optimizer_step_seconds, time_moves

MOST_PAGES: Final = 512
"""Largest number of pages in a prediction; each represents several pages of a larger table."""

LEAST_LINK_SHARE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class StateOption:
    """A place of model states.

    Attributes:
        stage: states that leave the device: 0 none, 1 Adam's states, 2 gradients too, 3 parameters of layers too.
        window_layers: layers with parameters on the device at a time, in stage 3.
        disk_share: share of the pages that are on a disk, 0 to 1.
    """

    stage: int = 0
    window_layers: int = 2
    disk_share: float = 0.0

    def of(self, case: StateCase) -> StateCase:
        """Return the states of a pipeline stage in this option; resident states count as stage 1."""
        return replace(case, stage=max(1, self.stage), window_layers=self.window_layers)

    def device_bytes(self, case: StateCase) -> float:
        """Return the device memory of the states of a process in a step."""
        return self.of(case).paged_bytes if self.stage else case.resident_bytes

    def host_bytes(self, case: StateCase) -> float:
        """Return the host memory of the states of a process, with the buffers of a disk."""
        if not self.stage:
            return 0.0
        case = self.of(case)
        if not self.disk_share:
            return case.host_bytes
        return case.least_host_bytes + (1.0 - self.disk_share) * max(0, case.host_bytes - case.least_host_bytes)

    def described(self) -> str:
        """Return the option in a few words."""
        if not self.stage:
            return "resident"
        window = (
            f" with {self.window_layers} layer{'s' * (self.window_layers > 1)} on the device" if self.stage == 3 else ""
        )
        disk = f", {self.disk_share:.0%} of the pages on a disk" if self.disk_share else ""
        return f"stage {self.stage}{window}{disk}"


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """Seconds of the states of a layer in each pass of a micro-batch.

    Attributes:
        parameters: seconds to copy parameters to the device.
        gradients: seconds to copy gradients to host memory, or to add them to their sums there: the longer of both.
    """

    parameters: float = 0.0
    gradients: float = 0.0

    @classmethod
    def of(cls, case: StateCase, option: StateOption, speeds: Speeds) -> LayerTraffic:
        """Return the traffic of a layer of a pipeline stage."""
        count = (case.num_parameters - case.with_layers(0).num_parameters) / case.shape.num_layers
        copied = count * case.element_bytes / speeds.link_bytes_per_second
        summed = count * (case.element_bytes + 2 * GRADIENT_BYTES) / speeds.adam_bytes_per_second
        return cls(copied if option.stage == 3 else 0.0, max(copied, summed) if option.stage > 1 else 0.0)

    def longer(self, load: LayerLoad, window_layers: int) -> LayerLoad:
        """Return the load with passes that take as long as computation or traffic, whichever is longer.

        Parameters overlap with computation only if the window has several layers; gradients always overlap.
        """
        if window_layers < 2:
            forward, backward = load.forward_seconds + self.parameters, load.backward_seconds + self.parameters
        else:
            forward = max(load.forward_seconds, self.parameters)
            backward = max(load.backward_seconds, self.parameters)
        return replace(load, forward_seconds=forward, backward_seconds=max(backward, self.gradients))

    def link_share(self, longer: LayerLoad) -> float:
        """Return the share of the link that parameters leave to activations in the backward pass of ``longer``."""
        if not self.parameters:
            return 1.0
        return max(LEAST_LINK_SHARE, 1.0 - self.parameters / longer.backward_seconds)


def end_seconds(case: StateCase, option: StateOption, speeds: Speeds) -> float:
    """Return the seconds of a micro-batch to copy the gradients of embedding and output layer to host memory.

    The copies overlap with nothing, because these gradients are the last of a backward pass.
    """
    copied = case.with_layers(0).num_parameters * case.element_bytes / speeds.link_bytes_per_second
    return copied if option.stage > 1 else 0.0


@lru_cache(maxsize=1024)
def update_seconds(
    case: StateCase, option: StateOption, speeds: Speeds, memory_bytes_per_second: float, num_ranks: int
) -> float:
    """Return the seconds of a step that follow its last backward pass on a process.

    Resident states are updated at the speed of device memory, ``memory_bytes_per_second``. From stage 2 on gradients in
    host memory are normed and scaled there, and those that ``num_ranks`` ranks share cross the link twice to be summed.
    """
    count = case.num_parameters
    if not option.stage:
        touched = 2 * (MAIN_PARAMETER_BYTES + MOMENT_BYTES) + GRADIENT_BYTES
        touched += case.element_bytes if case.element_bytes < MAIN_PARAMETER_BYTES else 0
        return count / case.optimizer_ranks * touched / memory_bytes_per_second
    case = option.of(case)
    all_bytes = sum(tensor.num_elements for tensor in case.tensors) * MAIN_PARAMETER_BYTES
    coarse = replace(case, page_bytes=max(case.page_bytes, -(-all_bytes // MOST_PAGES)))
    number = len(coarse.table.pages)
    on_disk = spread(number, round(option.disk_share * number))
    seconds = optimizer_step_seconds(time_moves(coarse.table, case.element_bytes, speeds.of_stage(case.stage), on_disk))
    if case.stage > 1:
        seconds += (
            3 * count * GRADIENT_BYTES / speeds.adam_bytes_per_second
        )  # gradients are read for the norm, and read and written for the scaling
        seconds += 2 * count * GRADIENT_BYTES / speeds.link_bytes_per_second * (num_ranks > 1)
    if case.stage == 3:
        seconds += case.with_layers(0).num_parameters * case.element_bytes / speeds.link_bytes_per_second
    return seconds
