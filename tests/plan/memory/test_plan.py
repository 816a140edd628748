from __future__ import annotations

import json

from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import MemoryPlan, TwoLevelPlan
from tests.plan.memory.traces import layer_trace


def test_json_comes_back() -> None:
    plan = plan_memory(layer_trace(2))
    assert MemoryPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    two = TwoLevelPlan({"forward": plan, "backward": plan_memory([])}, plan)
    assert TwoLevelPlan.from_json(json.loads(json.dumps(two.to_json()))) == two
