"""Resolves parsed arguments into one frozen ``RunConfig``."""

from __future__ import annotations

from typing import Any

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.setup.choose import choose
from megatron.bytescale import features
from megatron.bytescale.arguments.model_shape import process
from megatron.bytescale.arguments.setup import setup_of


def resolve(args: Any) -> RunConfig:
    """Return the configuration of a run, from arguments that Megatron has checked. Call it once.

    It chooses slices, activation policy and model states together. Then features resolve in the order of their table,
    and each feature sees the configurations of earlier features.

    Raises ValueError, before anything is built, for settings that do not fit together.
    """
    setup = setup_of(args)
    measured = setup.cost if setup.measured else None
    run = RunConfig(setup.shape, setup.cluster, measured, process(args), setup.mesh.stage_layers, choose(setup))
    for feature in features.enabled(args):
        run = run.with_feature(feature.name, feature.resolve(feature.read(args), run))
    return run
