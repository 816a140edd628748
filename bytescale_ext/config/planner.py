"""The planner of a run."""

from __future__ import annotations

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.memory.offload import PlannedOffload
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.evaluate.policy_choice import PolicyChoice
from bytescale_ext.plan.evaluate.slicing_choice import SlicingChoice
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing


def slicing(run: RunConfig) -> Slicing:
    """Return how micro-batches are sliced."""
    slices = run.find(DocumentSliceConfig) or run.find(SliceConfig)
    return ONE_SLICE if slices is None else slices.slicing


def planned_offload(run: RunConfig) -> PlannedOffload | None:
    """Return the limits within which plans offload activations, or None where they offload nothing."""
    activations = run.find(ActivationConfig)
    return None if activations is None else activations.offload


def step_cost(run: RunConfig) -> StageCost:
    """Return the cost that the planner balances: in seconds where plans offload, because Eq. 3 compares times."""
    offload, cost = planned_offload(run), run.get(HdpConfig).cost
    return cost if offload is None else offload.cost.on(cost.forward.nodes)


def slicing_choice(run: RunConfig) -> SlicingChoice | PolicyChoice | None:
    """Return what chooses the slices of each step, or None where they are given."""
    slices, activations = run.find(DocumentSliceConfig), run.find(ActivationConfig)
    if activations is not None and activations.options:
        return PolicyChoice(activations.fitting_options)
    return None if slices is None else slices.choice


def offload_layers(run: RunConfig) -> int | None:
    """Return the layers of a rank where plans may offload, which their check needs; else None."""
    offload = planned_offload(run)
    return None if offload is None else offload.limits.num_layers


def planner_of(run: RunConfig) -> HdpPlanner:
    """Return the function from the lengths of a step to its plan; pure, equal on every rank."""
    hdp, offload = run.get(HdpConfig), planned_offload(run)
    return HdpPlanner(
        hdp.cluster,
        (step_cost(run),) * hdp.num_stages,
        slicing(run),
        tokens_multiple=hdp.rows_multiple,
        balance=hdp.balance,
        aligned=hdp.aligned,
        static_width=hdp.static_width,
        offload=None if offload is None else offload.limits,
        choice=slicing_choice(run),
        expert_share=hdp.expert_share,
    )
