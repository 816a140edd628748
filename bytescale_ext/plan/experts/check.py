"""The independent validator of placements. It shares no code with the planners."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.experts.placement import PlacementPlan


def check_placement(plan: PlacementPlan, num_experts: int, num_slots: int) -> None:
    """Raise PlanError unless the plan keeps every law.

    1. It is of this many experts, and each rank has this many slots, each with a quota.
    2. The first slots of a rank are the homes of its experts, in order: every expert has one home.
    3. No rank holds an expert twice, and no slot holds an expert that does not exist.
    4. Empty slots come last and have no quota; replicas have one.
    5. Quotas are not negative, and those of an expert are 1,024 together.

    The message holds the law and the printed plan, with ``>>`` before the bad rank.
    """
    if plan.num_experts != num_experts:
        _fail(plan, None, f"it is of {plan.num_experts} experts, not of {num_experts}")
    if len(plan.quotas) != len(plan.slots):
        _fail(plan, None, f"{len(plan.slots)} ranks have {len(plan.quotas)} rows of quotas")
    of_rank = num_experts // len(plan.slots)
    sums: Counter[int] = Counter()
    for rank, (experts, quotas) in enumerate(zip(plan.slots, plan.quotas, strict=True)):
        if len(experts) != num_slots or len(quotas) != num_slots:
            _fail(plan, rank, f"{len(experts)} slots and {len(quotas)} quotas where there are {num_slots} slots")
        if experts[:of_rank] != tuple(range(rank * of_rank, (rank + 1) * of_rank)):
            _fail(plan, rank, "an expert is not in its home")
        _check_replicas(plan, rank, of_rank)
        for expert, quota in zip(experts, quotas, strict=True):
            sums[expert] += quota
    for expert in range(num_experts):
        if sums[expert] != 1024:
            _fail(plan, None, f"the quotas of expert {expert} are {sums[expert]} together, not 1024")


def _check_replicas(plan: PlacementPlan, rank: int, of_rank: int) -> None:
    """Raise PlanError unless the slots of a rank hold distinct experts, empty ones last, with fitting quotas."""
    experts, quotas = plan.slots[rank], plan.quotas[rank]
    used = [expert for expert in experts if expert != -1]
    if experts[: len(used)] != tuple(used):
        _fail(plan, rank, "an empty slot comes before a replica")
    if len(set(used)) < len(used):
        _fail(plan, rank, "an expert is held twice")
    if any(not 0 <= expert < plan.num_experts for expert in used):
        _fail(plan, rank, "there is no such expert")
    if min(quotas) < 0:
        _fail(plan, rank, "a quota is negative")
    if any(quotas[len(used) :]):
        _fail(plan, rank, "an empty slot has a quota")
    if not all(quotas[of_rank : len(used)]):
        _fail(plan, rank, "a replica has no quota")


def _fail(plan: PlacementPlan, rank: int | None, law: str) -> NoReturn:
    """Raise PlanError with the printed plan; a law about no single rank marks the heading."""
    heading = f"{plan.num_experts} experts on {len(plan.slots)} ranks"
    lines = [heading, *(f"rank {number}: {experts}" for number, experts in enumerate(plan.slots))]
    marked = 0 if rank is None else rank + 1
    printed = "\n".join(f"{'>>' if row == marked else '  '} {line}" for row, line in enumerate(lines))
    raise PlanError(f"{law}\n{printed}")
