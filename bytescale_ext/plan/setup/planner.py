"""Planner of a setup."""

from __future__ import annotations

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import expert_share
from bytescale_ext.plan.evaluate.schedulers import Scenario
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import auto_balance
from bytescale_ext.plan.setup.choose import Decision
from bytescale_ext.plan.setup.costs import slowest_stage, stage_costs
from bytescale_ext.plan.setup.memory import stage_memory
from bytescale_ext.plan.setup.setup import AUTO, Setup


def planner_of(decision: Decision) -> HdpPlanner:
    """Return the function from the lengths of a step to its plan; pure, equal on every rank."""
    setup = decision.setup
    return HdpPlanner(
        setup.cluster,
        (balanced_cost(decision),) * setup.mesh.num_stages,
        decision.finest,
        tokens_multiple=setup.rows_multiple,
        balance=balance_of(setup),
        aligned=setup.has_aligned_slots,
        static_width=setup.planning.static_width,
        offload=None if decision.offload is None else decision.offload.limits,
        choice=decision.slices,
        expert_share=share_of_experts(setup),
    )


def balanced_cost(decision: Decision) -> StageCost:
    """Return the cost of the slowest stage, which the planner balances.

    It is in seconds if plans offload activations, because ByteScale's Eq. 3 compares times.
    """
    return slowest_stage(decision.setup)[1] if decision.offload is None else decision.offload.cost


def balance_of(setup: Setup) -> str:
    """Return the name of the planner; "auto" becomes the balance planner that fits the mesh."""
    balance = setup.planning.balance
    return auto_balance(setup.has_aligned_slots) if balance == AUTO else balance


def share_of_experts(setup: Setup) -> float:
    """Return the share of routed experts in the work of the slowest stage that is linear in tokens."""
    stage, _ = slowest_stage(setup)
    return expert_share(setup.shape, setup.mesh.stage_layers[stage], stage == setup.mesh.last_stage)


def scenario_of(decision: Decision) -> Scenario:
    """Return the scenario of a decision. It compares schedulers by passes, without messages and updates."""
    setup = decision.setup
    return Scenario(setup.sequences.longest, stage_costs(setup), stage_memory(setup), planner_of(decision))
