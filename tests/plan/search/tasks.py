"""Small tasks for the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.search.task import Devices, Task

SHAPE = ModelShape(
    num_layers=6, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden=128, gated=True, vocab=256
)
SPARSE = replace(SHAPE, num_expert_layers=6, expert_ffn_hidden=256, num_experts=8, experts_per_token=2)
LAYER = CostModel(a=1e-9, b=2e-6, c=5e-8, g=3e-5)
COST = ModelCost(
    SHAPE, "a device", "bfloat16", 1, "test", LAYER, replace(LAYER.scaled(2.0), a=2.5e-9), 1e-6, 2e-6, 2000.0, 128.0
)
STEPS = ((3000, 200, 900, 40, 2500, 700, 64, 1200), (100, 4000, 300, 600, 90, 1500, 800, 30))


def small_task(**changes: float) -> Task:
    """Return a task of 8 devices in nodes of 4; ``changes``: fields of the devices, for example ``memory_bytes``."""
    return Task(COST, replace(Devices(8, 4, 1e9), **changes), 4096, STEPS)


def random_task(seed: int) -> Task:
    """Return a task of 4 devices with random costs, lengths and memory."""
    random = np.random.default_rng(seed)
    forward = CostModel(*(10.0 ** random.uniform(low, low + 2) for low in (-10, -7, -9, -6)))
    cost = replace(COST, forward=forward, backward=forward.scaled(2.2), collective=10.0 ** random.uniform(-11, -9))
    steps = tuple(tuple(int(length) for length in np.ceil(10.0 ** random.uniform(1.0, 3.3, 4))) for _ in range(2))
    return Task(cost, Devices(4, 4, 10.0 ** random.uniform(7.2, 9.0)), 2048, steps)
