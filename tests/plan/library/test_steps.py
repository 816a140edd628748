"""The planner as a library: the examples of its page, numpy alone, and plans without rings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.library.steps import plan_step
from bytescale_ext.plan.step.sizes import Cluster

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "library.md"
COST = StageCost(CostModel(a=1e-9, b=4e-6, g=1e-4), CostModel(a=2e-9, b=8e-6, g=2e-4))
FOREIGN = """
import sys
import bytescale_ext.plan.library.balancers
import bytescale_ext.plan.library.steps
names = {name.split(".")[0] for name in sys.modules}
print(sorted(name for name in names - sys.stdlib_module_names if not name.startswith("_")))
"""


def test_the_examples_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(int(seq) for line in printed[:4] for seq in re.findall(r"\d+", line)[1:]) == list(range(12))
    assert any(len(shard.ring) > 1 for rank in names["plan"].ranks for one in rank for shard in one.shards)
    assert len(examples) == 4


@pytest.mark.ranks
def test_a_process_that_plans_imports_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FOREIGN], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "['bytescale_ext', 'numpy']"


@pytest.mark.parametrize("seed", range(4))
def test_ranks_without_rings_have_equal_work(seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(7.0, 0.8, 512).clip(1, 8192).astype(int).tolist()
    cluster = Cluster(16, 16384)
    plan = plan_step(lengths, cluster, COST, rings=False)
    assert all(len(shard.ring) == 1 for rank in plan.ranks for one in rank for shard in one.shards)
    assert replay(plan, COST.both).makespan <= 1.02 * lower_bounds(lengths, cluster, [COST]).largest


def test_fewer_sequences_than_ranks() -> None:
    plan = plan_step([5, 3], Cluster(4, 8), COST, rings=False)
    assert sorted(len(rank) for rank in plan.ranks) == [0, 0, 1, 1]
    assert [len(rank) for rank in plan_step([], Cluster(2, 8), COST, rings=False).ranks] == [0, 0]


def test_what_cannot_be_planned_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="allow rings or raise the tokens per rank to 9"):
        plan_step([4, 9], Cluster(4, 8), COST, rings=False)
    with pytest.raises(ValueError, match="different speeds"):
        plan_step([4], Cluster(2, 8, speeds=(1.0, 0.5)), COST, rings=False)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        plan_step([0], Cluster(2, 8), COST, rings=False)
    with pytest.raises(ValueError, match="0 stages"):
        plan_step([4], Cluster(2, 8), [], rings=False)
