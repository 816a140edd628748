"""Runs without a command line, for tests."""

from __future__ import annotations

from typing import Any

import torch

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import Process, RunConfig
from bytescale_ext.plan.cost.model_cost import flops_stage_cost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.step.sizes import Cluster

SHAPE = ModelShape(2, 32, 4, 2, 8, 48, True, 128)
PROCESS = Process(rank=0, local_rank=0, on_cuda=False, dtype=torch.float32)


def hdp_of(
    num_ranks: int = 4, tokens_per_rank: int = 64, ranks_per_node: int | None = None, **changes: Any
) -> HdpConfig:
    """Return settings of hybrid data parallelism for a small model."""
    cluster = Cluster(num_ranks, tokens_per_rank, ranks_per_node)
    stages = changes.get("num_stages", 1)
    return HdpConfig(
        cluster, **{"cost": flops_stage_cost(SHAPE, -(-SHAPE.num_layers // stages)), "longest_sequence": 256, **changes}
    )


def run_of(
    *configs: object, shape: ModelShape = SHAPE, cost: Any = None, stage_layers: tuple[int, ...] = ()
) -> RunConfig:
    """Return a run with these features, by the names of their classes; its stages have equal layers by default."""
    hdp = next((config for config in configs if isinstance(config, HdpConfig)), None)
    stages = 1 if hdp is None else hdp.num_stages
    layers = (-(-shape.num_layers // stages),) * stages
    run = RunConfig(shape, Cluster(4, 64) if hdp is None else hdp.cluster, cost, PROCESS, stage_layers or layers)
    for config in configs:
        run = run.with_feature(type(config).__name__, config)
    return run
