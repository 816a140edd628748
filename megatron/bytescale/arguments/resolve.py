"""Resolve parsed arguments into one frozen ``RunConfig``."""

from __future__ import annotations

from typing import Any

from bytescale_ext.config.run import RunConfig
from megatron.bytescale import features
from megatron.bytescale.arguments.model_shape import cluster, measured_cost, model_shape, process, stage_layers


def resolve(args: Any) -> RunConfig:
    """Return the configuration of a run, from arguments that Megatron has checked. Call it once.

    Features resolve in the order of their table, and each sees the configurations of those before it.

    Raises ValueError, before anything is built, for settings that do not fit together.
    """
    shape = model_shape(args)
    run = RunConfig(shape, cluster(args), measured_cost(args, shape), process(args), stage_layers(args))
    for feature in features.enabled(args):
        run = run.with_feature(feature.name, feature.resolve(feature.read(args), run))
    return run
