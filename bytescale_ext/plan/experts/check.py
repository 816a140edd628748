"""Independent validator of placements. It shares no code with the planners."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.experts.placement import PlacementPlan


def check_placement(plan: PlacementPlan, num_experts: int, num_slots: int) -> None:
    """Raise PlanError unless the plan satisfies every rule.

    1. The plan has ``num_experts`` experts. Each rank has ``num_slots`` slots, and each slot has a quota.
    2. The first slots of a rank contain the experts whose home it is, in order, so every expert has one home.
    3. No rank has the same expert in two slots, and every expert in a slot exists.
    4. Empty slots come last and have the quota 0; replicas have a positive quota.
    5. Quotas are not negative, and the quotas of an expert sum to 1,024.

    The message contains the violated rule and the printed plan, with ``>>`` before the rank that violates it.
    """
    if plan.num_experts != num_experts:
        _fail(plan, None, f"the plan has {plan.num_experts} experts instead of {num_experts}")
    if len(plan.quotas) != len(plan.slots):
        _fail(plan, None, f"{len(plan.slots)} ranks have {len(plan.quotas)} rows of quotas")
    of_rank = num_experts // len(plan.slots)
    sums: Counter[int] = Counter()
    for rank, (experts, quotas) in enumerate(zip(plan.slots, plan.quotas, strict=True)):
        if len(experts) != num_slots or len(quotas) != num_slots:
            _fail(plan, rank, f"{len(experts)} slots and {len(quotas)} quotas instead of {num_slots}")
        if experts[:of_rank] != tuple(range(rank * of_rank, (rank + 1) * of_rank)):
            _fail(plan, rank, "an expert is not in its home slot")
        _check_replicas(plan, rank, of_rank)
        for expert, quota in zip(experts, quotas, strict=True):
            sums[expert] += quota
    for expert in range(num_experts):
        if sums[expert] != 1024:
            _fail(plan, None, f"the quotas of expert {expert} sum to {sums[expert]} instead of 1024")


def _check_replicas(plan: PlacementPlan, rank: int, of_rank: int) -> None:
    """Raise PlanError unless the slots of a rank satisfy rules 3 and 4, and no quota is negative."""
    experts, quotas = plan.slots[rank], plan.quotas[rank]
    used = [expert for expert in experts if expert != -1]
    if experts[: len(used)] != tuple(used):
        _fail(plan, rank, "an empty slot comes before a replica")
    if len(set(used)) < len(used):
        _fail(plan, rank, "an expert is in two slots")
    if any(not 0 <= expert < plan.num_experts for expert in used):
        _fail(plan, rank, "an expert in a slot does not exist")
    if min(quotas) < 0:
        _fail(plan, rank, "a quota is negative")
    if any(quotas[len(used) :]):
        _fail(plan, rank, "an empty slot has a quota")
    if not all(quotas[of_rank : len(used)]):
        _fail(plan, rank, "a replica has no quota")


def _fail(plan: PlacementPlan, rank: int | None, rule: str) -> NoReturn:
    """Raise PlanError with the printed plan. ``rank``: rank to mark; None marks the heading."""
    heading = f"{plan.num_experts} experts on {len(plan.slots)} ranks"
    lines = [heading, *(f"rank {number}: {experts}" for number, experts in enumerate(plan.slots))]
    marked = 0 if rank is None else rank + 1
    printed = "\n".join(f"{'>>' if row == marked else '  '} {line}" for row, line in enumerate(lines))
    raise PlanError(f"{rule}\n{printed}")
