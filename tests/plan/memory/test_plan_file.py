"""File of the plans of a pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.plan.memory.plan_file import PlanFile
from bytescale_ext.plan.memory.step_file import StepParallelism
from bytescale_ext.plan.step.sizes import Slicing
from tests.plan.memory.test_step_file import MEMORY

LAYOUT = StepParallelism(2, True, (2, 2), 2, 4, True, 8, (48, 16), Slicing(2, eager=True))
FIRST = replace(MEMORY, record=replace(MEMORY.record, layout=LAYOUT))
LAST = replace(FIRST, buffer_bytes=2048)
FILE = PlanFile.of({(0, 0): FIRST, (0, 1): FIRST, (1, 0): LAST, (1, 1): FIRST})


def test_equal_plans_are_kept_once_and_come_back() -> None:
    assert FILE == PlanFile(((0, 0), (1, 0)), (FIRST, LAST))
    assert PlanFile.from_json(json.loads(json.dumps(FILE.to_json()))) == FILE
    assert FILE.plan_of(1, 0) == LAST
    assert FILE.plan_of(1, 1) == FILE.plan_of(0, 0) == FIRST
    assert FILE.plan_of(7, 7) == FIRST  # its layout differs


def test_the_plan_of_one_process_is_a_file_of_one_role() -> None:
    assert PlanFile.from_json(json.loads(json.dumps(MEMORY.to_json()))) == PlanFile(((0,),), (MEMORY,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": [[0, 0]]}, "its roles are not for 2 stages of 2 ranks"),
        ({"roles": [[0, 0], [1]]}, "its roles are not for 2 stages of 2 ranks"),
        ({"roles": [[0, 0], [0, 0]]}, "its roles do not name each of its 2 plans"),
        ({"roles": [[0, 0], [1, 2]]}, "its roles do not name each of its 2 plans"),
        ({"roles": 3}, "not a memory plan"),
        ({"plans": 3}, "not a memory plan"),
        ({"plans": [FIRST.to_json(), MEMORY.to_json()]}, "its 2 plans have 2 different layouts"),
        ({"plans": [{}]}, "not a memory plan"),
    ],
)
def test_damaged_files_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanFile.from_json({**json.loads(json.dumps(FILE.to_json())), **changes})
