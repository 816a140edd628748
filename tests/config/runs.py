"""Runs without a command line, for tests."""

from __future__ import annotations

from typing import Any

import torch

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import Process, RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.model_cost import flops_stage_cost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.setup import Mesh, Numerics, Planning, Sequences, Setup
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster

SHAPE = ModelShape(2, 32, 4, 2, 8, 48, True, 128)
PROCESS = Process(rank=0, on_cuda=False, dtype=torch.float32)


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
    layers = stage_layers or (-(-shape.num_layers // stages),) * stages
    setup = Setup(
        shape=shape,
        mesh=Mesh(layers),
        numerics=Numerics(element_bytes=4, rows=1 if hdp is None else hdp.rows_multiple),
        cluster=Cluster(4, 64) if hdp is None else hdp.cluster,
        cost=cost or cost_of_rates(shape, 1e12, 1e12, 1e12),
        sequences=Sequences(256 if hdp is None else hdp.longest_sequence, are_documents=hdp is not None),
        slicing=next((one.slicing for one in configs if isinstance(one, DocumentSliceConfig | SliceConfig)), ONE_SLICE),
        planning=Planning() if hdp is None else Planning(hdp.balance, hdp.static_width),
        measured=cost is not None,
    )
    run = RunConfig(shape, setup.cluster, cost, PROCESS, layers, choose(setup))
    for config in configs:
        run = run.with_feature(type(config).__name__, config)
    return run
