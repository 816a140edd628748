"""The table of planners: every row keeps its promises, and a new row needs no other edit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp import table
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import PLANNERS, STATIC_MESH, PlannerRow, auto_balance, planner_names, planner_row
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster, Slicing

STAGE = StageCost(CostModel(a=4e-8, b=1.6e-3, c=1.8e-4, g=0.1), CostModel(a=1e-7, b=3.2e-3, c=3.7e-4, g=0.2))
CLUSTER = Cluster(8, 1024)
LENGTHS = np.random.default_rng(8).integers(1, 3000, 60).tolist()


def planner_of(row: PlannerRow) -> HdpPlanner:
    if row is STATIC_MESH:
        return HdpPlanner(CLUSTER, (STAGE,), static_width=4)
    return HdpPlanner(CLUSTER, (STAGE,), balance=row.name)


@pytest.mark.parametrize("row", [*PLANNERS, STATIC_MESH], ids=lambda row: row.name)
def test_each_row_makes_the_slots_that_it_promises(row: PlannerRow) -> None:
    planner = planner_of(row)
    assert planner.row is row
    if not row.aligned:
        with pytest.raises(ValueError, match=f"{row.name} makes no aligned slots.*choose {auto_balance(aligned=True)}"):
            replace(planner, aligned=True)
        return
    plan = replace(planner, aligned=True)(LENGTHS)
    assert plan.aligned
    check_step_plan(plan, LENGTHS)


@pytest.mark.parametrize("row", [row for row in PLANNERS if row.aligned], ids=lambda row: row.name)
def test_only_planners_for_slices_are_told_of_slices(row: PlannerRow) -> None:
    base = replace(planner_of(row), stages=(STAGE,) * 4)
    whole, sliced = (replace(base, slicing=Slicing(num_slices))(LENGTHS).digest() for num_slices in (1, 8))
    assert (whole != sliced) == row.sliced


def test_names_choose_rows() -> None:
    assert planner_names() == ("none", "dp", "pp", "bytescale")
    assert [planner_row(name) for name in planner_names()] == list(PLANNERS)
    assert not planner_row(auto_balance(aligned=False)).aligned
    assert planner_row(auto_balance(aligned=True)).aligned
    with pytest.raises(ValueError, match="balance 'static' is unknown; choose one of none, dp, pp, bytescale"):
        planner_row(STATIC_MESH.name)


def test_help_names_every_planner_and_what_it_balances() -> None:
    text = table.planner_help()
    assert all(f"{row.name}: {row.summary}" in text for row in PLANNERS)
    assert not any(row.summary.endswith(".") for row in PLANNERS)
