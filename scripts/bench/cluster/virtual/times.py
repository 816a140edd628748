"""Seconds of kernels, hosts and links of a modelled model on a named device.

The timings of devices (``devices/NAME.json``) name their sources. A kernel of attention takes a start, a time for each
query and a time for each pair of a query and a key, however many documents it has, because a kernel of
variable length is one launch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import (
    ATTENTION_BACKWARD_PER_FORWARD,
    BACKWARD_PER_FORWARD,
    KEY_SUM_BYTES,
    ModelShape,
    key_value_numbers,
    layer_flops_per_token,
)
from scripts.bench.cluster.virtual.events import Work
from scripts.bench.plan.h100_costs import HEAD_DIM, HEADS, JOINED_BYTES, Fitted, cost_of

DEVICES: Final = Path(__file__).parent / "devices"
HOSTS: Final = Path(__file__).parent / "host.json"


@dataclass(frozen=True)
class DeviceTimes:
    """Timings of one device.

    Attributes:
        name: name of the device.
        source: origin of the timings.
        attention_flops: FLOP/s of causal attention over the computed pairs, in bfloat16.
        attention_token: seconds of an attention kernel for a query and a number of its heads.
        attention_start: seconds of an attention kernel without queries.
        linear_flops: FLOP/s of matrix products.
        memory_bytes: bytes per second of the device's memory.
        node_bytes: bytes per second that a device sends, and receives, inside its node.
        node_latency, network_latency: seconds of a message without bytes, inside a node and between nodes.
    """

    name: str
    source: str
    attention_flops: float
    attention_token: float
    attention_start: float
    linear_flops: float
    memory_bytes: float
    node_bytes: float
    node_latency: float
    network_latency: float

    @classmethod
    def read(cls, name: str) -> DeviceTimes:
        """Return the timings of a device by its name, or from a file. Raises ValueError for an unknown name."""
        path = DEVICES / f"{name}.json"
        path = path if path.exists() else Path(name)
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            known = ", ".join(sorted(file.stem for file in DEVICES.glob("*.json")))
            raise ValueError(
                f"--device-times {name}: not one of {known}, nor a file of such timings ({error})"
            ) from None


@dataclass(frozen=True)
class HostTimes:
    """Seconds of the host that launches.

    Attributes:
        layer: a layer of a micro-batch of local documents, or of a slice, in one direction.
        block: a further block of a ring, in one direction.
    """

    layer: float
    block: float

    @classmethod
    def read(cls, has_slices: bool = False, path: Path = HOSTS) -> HostTimes:
        """Return the recorded times. ``has_slices``: whether micro-batches run in slices."""
        recorded = json.loads(path.read_text())
        stock, ratios = recorded["stock_milliseconds"] * 1e-3 / 2, recorded["ratios"]
        block = stock * (ratios["ring of 8"] - ratios["local"]) / 7
        return cls(stock * ratios["slice of 4" if has_slices else "local"], block)


NO_HOST: Final = HostTimes(0.0, 0.0)


@dataclass(frozen=True)
class ModelTimes:
    """Times and bytes of a modelled model.

    Attributes:
        shape: sizes of the modelled model.
        recorded: sizes of the recorded model.
        device: timings of the device.
        host: times of the host.
        scale: modelled tokens for each recorded token.
        num_stages: stages of the pipelines.
        num_replicas: ranks of each stage, which share the states of the optimizer.
    """

    shape: ModelShape
    recorded: ModelShape
    device: DeviceTimes
    host: HostTimes
    scale: int
    num_stages: int = 1
    num_replicas: int = 1

    @property
    def repeats(self) -> int:
        """Modelled layers for each recorded layer."""
        return self.shape.num_layers // self.recorded.num_layers

    def with_repeats(self, count: int) -> ModelTimes:
        """Return the times of a model with ``count`` layers for each recorded layer."""
        return replace(self, shape=replace(self.shape, num_layers=count * self.recorded.num_layers))

    def seconds(self, work: Work) -> float:
        """Return the seconds of kernels on the device, except the optimizer."""
        device, shape, tokens = self.device, self.shape, work.tokens * self.scale
        if work.kind == "attention":
            return self._attention(work)
        if work.kind == "join":
            return self._join_bytes(work) / device.memory_bytes
        backward = BACKWARD_PER_FORWARD if work.is_backward else 1.0
        if work.kind == "head":
            return backward * 2.0 * shape.hidden * shape.vocab * tokens / device.linear_flops
        projections = 2.0 * shape.hidden * shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        flops = projections if work.kind == "before" else layer_flops_per_token(shape) - projections
        return backward * flops * tokens / device.linear_flops

    def _attention(self, work: Work) -> float:
        device, width = self.device, self.shape.num_heads * self.shape.head_dim
        pairs = sum(queries * keys for queries, keys in work.documents) * self.scale**2
        flops = 4.0 * width * (pairs / 2 if work.is_causal else pairs)
        queries = work.tokens * self.scale * width * device.attention_token
        factor, starts = (ATTENTION_BACKWARD_PER_FORWARD, BACKWARD_PER_FORWARD) if work.is_backward else (1.0, 1.0)
        return factor * (flops / device.attention_flops + queries) + starts * device.attention_start

    def _join_bytes(self, work: Work) -> float:
        """Return the bytes that are read and written."""
        queries = work.tokens * self.scale * self.shape.num_heads * self.shape.head_dim
        keys = work.keys * self.scale * key_value_numbers(self.shape) if work.is_backward else 0.0
        return JOINED_BYTES * (queries + keys)

    def optimizer_seconds(self, stage: int) -> float:
        """Return the seconds of the update: gradient, parameter and two moments in fp32, and bf16 parameters."""
        return self.parameters(self.shape, stage) / self.num_replicas * 30.0 / self.device.memory_bytes

    def parameters(self, shape: ModelShape, stage: int) -> float:
        """Return the parameters of a stage: its layers, the embedding of the first, the output layer of the last."""
        layers = shape.num_layers // self.num_stages * layer_flops_per_token(shape) / 2.0
        return layers + ((stage == 0) + (stage == self.num_stages - 1)) * shape.hidden * shape.vocab

    def message_bytes(self, kind: str, numbers: int) -> float:
        """Return the bytes of a message of ``numbers`` recorded numbers; ``kind``: of a ``Post``."""
        if kind == "stage":
            return 2.0 * numbers * self.scale * self.shape.hidden / self.recorded.hidden
        ratio = key_value_numbers(self.shape) / key_value_numbers(self.recorded)
        return (KEY_SUM_BYTES if kind == "sums" else 2.0) * numbers * self.scale * ratio

    def collective_bytes(self, kind: str, numbers: int, stage: int) -> float:
        """Return the bytes of a collective over ``numbers`` recorded parameters; ``kind``: of a ``Collective``."""
        if kind == "small":
            return 8.0 * numbers
        ratio = self.parameters(self.shape, stage) / self.parameters(self.recorded, stage)
        return (4.0 if kind == "reduce" else 2.0) * numbers * ratio


def planned_cost(times: ModelTimes, network_bytes: float) -> ModelCost:
    """Return the costs that the recorded run plans with: the modelled model on the device, in recorded tokens.

    They are made as the shipped costs are, from the timings of the device. Links are not shared.

    Args:
        network_bytes: bytes per second of a rank between nodes.
    """
    device, scale, repeats, width = times.device, times.scale, times.repeats, HEADS * HEAD_DIM
    constants = Fitted(
        square=2.0 * width / device.attention_flops,
        token=width * device.attention_token,
        attention_start=device.attention_start,
        linear_start=0.0,
        linear_flops=device.linear_flops,
        bytes_per_second=device.node_bytes,
        memory_bytes=device.memory_bytes,
    )
    cost = cost_of(times.shape, constants)

    def of_recorded(one: CostModel) -> CostModel:
        return replace(one, a=one.a * scale**2, b=one.b * scale, c=one.c * scale, h=one.h * scale).scaled(repeats)

    return replace(
        cost,
        shape=times.recorded,
        device=f"CPU in the times of {device.name}",
        dtype="float32",
        source=device.source,
        forward=of_recorded(cost.forward),
        backward=of_recorded(cost.backward),
        head_forward=cost.head_forward * scale,
        head_backward=cost.head_backward * scale,
        layer_bytes=cost.layer_bytes * scale * repeats,
        recompute_bytes=cost.recompute_bytes * scale * repeats,
        slowdown=max(1.0, device.node_bytes / network_bytes),
    )
