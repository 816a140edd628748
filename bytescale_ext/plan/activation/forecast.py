"""Predicted time, device memory and host memory of an activation plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytescale_ext.plan.activation.load import LayerLoad, Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost


@dataclass(frozen=True, slots=True)
class ActivationForecast:
    """Prediction for one plan.

    Attributes:
        transfer_seconds: seconds of one layer, one way.
        recompute_seconds: seconds of one layer.
        step_seconds: forward and backward of all layers of one micro-batch, with waits for transfers.
        device_bytes: peak bytes of activations on the device, with the logits, and with keys and gradient sums of
            slices.
        host_bytes: peak bytes of activations in host memory.
    """

    transfer_seconds: float
    recompute_seconds: float
    step_seconds: float
    device_bytes: float
    host_bytes: float

    def fits(self, machine: Machine) -> bool:
        """Return whether the plan fits in the machine's memory."""
        slack = 1 + 1e-9
        return self.device_bytes <= machine.device_bytes * slack and self.host_bytes <= machine.host_bytes * slack


def forecast(
    plan: ActivationPlan, load: LayerLoad, machine: Machine, need: DeviceNeed | None = None
) -> ActivationForecast:
    """Predict time and memory of one micro-batch.

    A swapped layer is written to host memory while the next layer computes, and read back while the next layer runs
    its backward pass (MEMO section 4.1, Fig. 10). Each step takes the longer of the two times: computing and copying.
    With several micro-batches in flight, the last layer of the next micro-batch is read while the first layer of this
    micro-batch runs backward. With a single micro-batch and no resident layers, the last layer's reading overlaps with
    nothing. For memory see ``DeviceNeed``; ``need`` avoids computing it again.
    """
    transferred = kept = recompute_seconds = 0.0
    for tensor in load.tensors:
        swap, keep, recompute = plan.shares(tensor)
        transferred += swap * tensor.bytes_per_token * load.num_tokens
        kept += keep * tensor.bytes_per_token * load.num_tokens
        recompute_seconds += recompute * load.rebuild_seconds(tensor, machine) if recompute else 0.0
    resident = load.num_layers if plan.is_off else min(plan.resident_layers, load.num_layers)
    planned = load.num_layers - resident
    transfer_seconds = transferred / machine.link_bytes_per_second
    each = max(load.forward_seconds, transfer_seconds)
    each += max(load.backward_seconds + recompute_seconds, transfer_seconds)
    waits = transfer_seconds if planned and not resident and load.in_flight == 1 else 0.0
    copies = 0.0
    if 0.0 < plan.recompute < 1.0 and not plan.rebuild_cheap:
        copies = plan.recompute * load.bytes_of("matrix", "cheap")
    need = need or DeviceNeed.of(load, resident, transferred > 0, copies, plan.rebuild_cheap)
    return ActivationForecast(
        transfer_seconds=transfer_seconds,
        recompute_seconds=recompute_seconds,
        step_seconds=planned * each + waits + resident * (load.forward_seconds + load.backward_seconds),
        device_bytes=need.device_bytes(kept),
        host_bytes=load.times_held * planned * transferred,
    )


def stage_cost(
    cost: ModelCost, load: LayerLoad, plan: ActivationPlan, machine: Machine, has_head: bool, chunks: int = 1
) -> StageCost:
    """Return the cost of a stage under a plan, with recomputation and with copies that do not overlap.

    Recomputing and copying take the same time for each token as in this load.

    Args:
        cost: costs of the model.
        load: load of all layers of the stage.
        plan: activation plan.
        machine: memory and link of the plan.
        has_head: whether the stage, or its chunk, has the output layer.
        chunks: number of virtual stages of the stage. The result is the cost of one virtual stage, with an even share
            of layers and copies.
    """
    predicted = forecast(plan, load, machine)
    planned = 0 if plan.is_off else load.num_layers - min(plan.resident_layers, load.num_layers)
    waits = planned * max(0.0, predicted.transfer_seconds - load.forward_seconds)
    longer = predicted.step_seconds - load.num_layers * (load.forward_seconds + load.backward_seconds)
    stage = cost.stage(load.num_layers // chunks, has_head)
    forward, backward = (CostModel(0.0, seconds / load.num_tokens / chunks) for seconds in (waits, longer - waits))
    return StageCost(stage.forward + forward, stage.backward + backward, stage.key_read)


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Device memory of activations at its peaks: at the loss, and in the backward pass of a planned layer.

    Each peak is a fixed number of bytes, and a number of layers whose kept bytes are added. At the loss the resident
    layers are whole. Without resident layers the last layer is whole, because it is still being written; with several
    micro-batches in flight, so is the last layer of the next micro-batch to run backward, which is read ahead. In the
    backward pass of a planned layer, this layer is whole, and so is the layer that is being read back, except for its
    cheap tensors, which are rebuilt. Gradients take additional memory; before them, rebuilt rows of a tensor do, until
    they are copied into it. In slices, all layers also hold keys and sums of key gradients until their own backward
    pass, and experts hold tensors that no policy moves. Layers of multi-token prediction are whole until the
    backward pass of the other layers; the last of these is written while they run. The last stage holds the memory
    behind its layers. Swapped keys are on the device in two layers. Gathered hidden states and messages of virtual
    stages exist during all passes.

    Attributes:
        peaks: bytes and number of layers of each peak.
    """

    peaks: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, load: LayerLoad, resident: int, moves: bool, copies: float = 0.0, products: bool = False) -> DeviceNeed:
        """Return the need of a load with ``resident`` layers kept whole.

        ``copies``: bytes of rebuilt rows; ``products``: planned layers rebuild from whole outputs of products.
        """
        layer, planned, peaks = load.whole_bytes, load.num_layers - resident, []
        on_its_way = min(2, load.in_flight) - (load.later_layers > 0) if moves and not resident else 0
        running = layer - (0.0 if products else load.bytes_of("view"))  # in its backward pass
        ahead = layer - load.bytes_of("cheap") if products else running  # on its way to host memory, or back
        for moment in load.moments:
            share, times = moment.running / load.num_tokens, moment.tokens / load.num_tokens
            working = load.working_bytes_at(moment)
            whole = min(2 if moves else 1, planned if resident else planned * times / share)
            held = load.num_layers * moment.bytes + moment.read + moment.head + moment.running * load.beside_bytes
            held += moment.tokens * load.received_bytes if moves else 0.0  # otherwise layers count them as kept
            others = (moment.tokens - moment.running) * load.later_bytes
            others += load.later_layers * moment.bytes * (1 - moment.running / moment.tokens)
            always = (times - share) * resident * layer + held + others
            of_later = moment.running * (load.later_bytes + load.later_layers * moment.bytes / moment.tokens)
            of_later += moment.running * load.later_gradient
            in_experts = moment.running * load.expert_working_bytes
            at_loss = share * (resident * layer + on_its_way * ahead) + max(working, in_experts, load.head_bytes)
            peaks.append((always + of_later + at_loss, max(0.0, times * planned - share * on_its_way)))
            if planned:
                read = share * max(whole - 1, 0) * ahead
                in_backward = share * min(whole, 1) * running + read + max(working, share * copies)
                if load.expert_bytes:  # experts run first; then their tensors are freed and the layer is read back
                    in_backward = max(read + in_experts, in_backward - moment.running * load.expert_bytes)
                peaks.append((always + in_backward, max(0.0, times * planned - share * whole)))
        return cls(tuple(peaks))

    def device_bytes(self, kept: float) -> float:
        """Return the largest peak with ``kept`` bytes of each planned layer on the device."""
        return max(fixed + layers * kept for fixed, layers in self.peaks)

    def most_kept(self, device_bytes: float) -> float:
        """Return the bytes of each planned layer that may be kept; negative if even 0 bytes do not fit."""
        return min(
            (device_bytes - fixed) / layers if layers else math.copysign(math.inf, device_bytes - fixed)
            for fixed, layers in self.peaks
        )
