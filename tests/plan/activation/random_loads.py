"""Random loads and machines, and the load of a 7B model, for tests of activation plans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from bytescale_ext.plan.activation.load import HeldSlices, LayerLoad, LayerSettings, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation.tensors import LayerTensor
from bytescale_ext.plan.cost.model_shape import ModelShape

LLAMA2_7B = ModelShape(32, 4096, 32, 32, 128, 11008, True, 32000)
COST = cost_of_rates(LLAMA2_7B, 650e12, 600e12, 500e12)
H200 = Machine(device_bytes=80e9, host_bytes=1e15)


def load_of(length: int, num_layers: int = 32, **changes: Any) -> LayerLoad:
    return replace(layer_load(COST, length, LayerSettings(num_layers)), **changes)


def random_load(dice: random.Random) -> LayerLoad:
    """Return a layer of a few tensors with random sizes and prices."""
    kinds = ("input", "input", "matrix", "matrix", "cheap")
    tensors = tuple(
        LayerTensor(
            f"{kind}{i}", kind, dice.randint(1, 20), dice.randint(1, 30) * (kind == "matrix"), dice.randint(1, 9)
        )
        for i, kind in enumerate(kinds)
    )
    return LayerLoad(
        tensors=tensors,
        num_tokens=dice.randint(1, 50),
        forward_seconds=dice.uniform(0.1, 5),
        backward_seconds=dice.uniform(0.1, 9),
        linear_seconds=dice.uniform(0.1, 4),
        linear_flops=100.0,
        num_layers=dice.randint(3, 6),
        resident_layers=dice.choice((0, 2)),
        in_flight=dice.choice((1, 1, 2)),
        head_bytes=float(dice.randint(0, 300)),
    )


def random_sliced_load(dice: random.Random) -> LayerLoad:
    """Return the random load of a slice on a stage with two to four slices in flight and their keys."""
    load = random_load(dice)
    moments = []
    for _ in range(3):
        running = dice.randint(1, load.num_tokens)
        tokens, keys = running + dice.randint(load.num_tokens, 3 * load.num_tokens), dice.uniform(0, load.bytes_of())
        moments.append(HeldSlices(running, tokens, keys, dice.choice((0.0, keys))))
    key = LayerTensor("key", "key", dice.randint(1, 9))
    return replace(load, tensors=(*load.tensors, key), in_flight=2, slices=tuple(moments))


def random_machine(dice: random.Random, load: LayerLoad) -> Machine:
    whole = load.num_layers * load.bytes_of()
    return Machine(
        device_bytes=dice.uniform(0.4, 2.0) * whole,
        host_bytes=dice.uniform(0.0, 1.5) * whole,
        link_bytes_per_second=load.bytes_of() / load.forward_seconds * dice.uniform(0.1, 3),
        memory_bytes_per_second=load.bytes_of() / load.forward_seconds * 20,
    )
