"""Costs of known devices: shipped cost files, scaled to any model. Plans use them without a cost file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape, key_value_bytes
from bytescale_ext.plan.search.costs import scaled_cost


@dataclass(frozen=True, slots=True)
class Device:
    """A device with shipped costs.

    Attributes:
        file: name of the shipped cost file.
        between_nodes: bytes per second of the link of a device to other nodes; 0: as fast as inside a node.
    """

    file: str
    between_nodes: float = 0.0


DEVICES: Final = {"h100": Device("h100_7b", 50e9), "bytescale": Device("bytescale_7b")}
"""Known devices by name: H100 with 400 Gbit/s for each GPU between nodes, and the GPU of ByteScale's cluster."""

DEFAULT_DEVICE: Final = "h100"
"""Device whose costs plans use without a cost file."""


def device_cost(name: str = DEFAULT_DEVICE) -> ModelCost:
    """Return the shipped costs of a device, of a 7B model. ``name``: one of ``DEVICES``."""
    device = DEVICES[name]
    cost = replace(shipped(device.file), source=f"shipped {name}")
    if not device.between_nodes:
        return cost
    inside = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes) / cost.forward.c
    return replace(cost, slowdown=max(1.0, inside / device.between_nodes))


def scaled_device_cost(
    shape: ModelShape,
    tensor_parallel: int,
    dtype: str,
    operators: LayerOperators = FUSED,
    name: str = DEFAULT_DEVICE,
) -> ModelCost:
    """Return the costs of a model on a known device.

    Bytes of keys and activations follow the parameter type; rates of computation are the device's in bfloat16.

    Args:
        shape: sizes of the model.
        tensor_parallel: ranks that share each layer.
        dtype: parameter type, for example "bfloat16".
        operators: operators of a layer.
        name: one of ``DEVICES``.
    """
    known = device_cost(name)
    if (shape, tensor_parallel, dtype) == (known.shape, known.tensor_parallel, known.dtype):
        return known
    cost = replace(scaled_cost(known, shape, tensor_parallel, operators), dtype=dtype, source=f"{known.source}, scaled")
    ratio = cost.element_bytes / known.element_bytes

    def in_type(one: CostModel) -> CostModel:
        return replace(one, c=one.c * ratio)

    return replace(
        cost,
        forward=in_type(cost.forward),
        backward=in_type(cost.backward),
        layer_bytes=cost.layer_bytes * ratio,
        recompute_bytes=cost.recompute_bytes * ratio,
    )
