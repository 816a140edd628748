"""File of memory plans of each stage and tensor-parallel rank of a pipeline. Equal plans are stored once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from bytescale_ext.json_input import whole
from bytescale_ext.plan.memory.step_file import StepMemory, StepMemoryJson, StepRecord


class PlanFileJson(TypedDict):
    """JSON format of the plans of a pipeline."""

    roles: list[list[int]]
    plans: list[StepMemoryJson]


@dataclass(frozen=True, slots=True)
class RecordTo:
    """Recording of a step.

    Attributes:
        path: output file of the plans.
        record: settings of this rank's step.
    """

    path: Path
    record: StepRecord


@dataclass(frozen=True, slots=True)
class PlanFile:
    """Plans of all ranks of a pipeline. All pipelines have the same plans.

    Attributes:
        roles: index in ``plans`` for each tensor-parallel rank of each stage: ``roles[stage][tensor rank]``.
        plans: different plans.
    """

    roles: tuple[tuple[int, ...], ...]
    plans: tuple[StepMemory, ...]

    @classmethod
    def of(cls, ranks: Mapping[tuple[int, int], StepMemory]) -> PlanFile:
        """Return the file for the plans of all ranks, by (stage, tensor rank)."""
        plans: list[StepMemory] = []
        roles: dict[int, list[int]] = {}
        for stage, tensor_rank in sorted(ranks):
            plan = ranks[stage, tensor_rank]
            if plan not in plans:
                plans.append(plan)
            roles.setdefault(stage, []).append(plans.index(plan))
        return cls(tuple(map(tuple, roles.values())), tuple(plans))

    def plan_of(self, stage: int, tensor_rank: int) -> StepMemory:
        """Return the plan of a rank. If the file has fewer ranks, this is the plan of its last rank.

        ``StepMemory.check_serves`` then reports the different layout.
        """
        ranks = self.roles[min(stage, len(self.roles) - 1)]
        return self.plans[ranks[min(tensor_rank, len(ranks) - 1)]]

    def to_json(self) -> PlanFileJson:
        """Return plain lists and dicts."""
        return {"roles": [list(ranks) for ranks in self.roles], "plans": [plan.to_json() for plan in self.plans]}

    @classmethod
    def from_json(cls, value: object) -> PlanFile:
        """Return the checked plans of a pipeline, or the checked plan of one process.

        Raises ValueError for another format, an invalid plan, or roles that do not fit the recorded layout.
        """
        if not (isinstance(value, Mapping) and "roles" in value and "plans" in value):
            return cls(((0,),), (StepMemory.from_json(cast(StepMemoryJson, value)),))
        try:
            plans = tuple(StepMemory.from_json(plan) for plan in value["plans"])
            roles = tuple(tuple(whole(number) for number in ranks) for ranks in value["roles"])
        except TypeError as error:
            raise ValueError(f"not a memory plan ({error})") from None
        layouts = {plan.record.layout for plan in plans}
        if len(layouts) != 1:
            raise ValueError(f"an invalid memory plan: its {len(plans)} plans have {len(layouts)} different layouts")
        (layout,) = layouts
        if [len(ranks) for ranks in roles] != [layout.tensor_parallel] * layout.num_stages:
            raise ValueError(
                f"an invalid memory plan: its roles are not for {layout.num_stages} stages of "
                f"{layout.tensor_parallel} ranks"
            )
        if {number for ranks in roles for number in ranks} != set(range(len(plans))):
            raise ValueError(f"an invalid memory plan: its roles do not name each of its {len(plans)} plans")
        return cls(roles, plans)
