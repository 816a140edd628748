"""Planning problems for tests of single planners."""

from __future__ import annotations

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.sizes import Cluster


def problem(
    lengths: np.ndarray, min_widths: np.ndarray, cluster: Cluster, cost: CostModel, aligned: bool = False
) -> Problem:
    """Return a problem with one stage; forward and backward together cost ``cost``."""
    free = CostModel(a=0.0, b=0.0)
    return Problem(lengths, min_widths, cluster, (StageCost(cost, free),), aligned=aligned)
