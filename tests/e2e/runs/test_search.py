"""Launch lines of the search: Megatron's parser accepts them, a dry run forecasts the same memory, and they train."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.measure.cost_file import shipped, write_cost
from bytescale_ext.plan.search.costed import CostedStrategy, setup_of_strategy
from bytescale_ext.plan.search.costs import scaled_cost
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import BLOCK, FULL, KEEP, PRICED, Strategy
from bytescale_ext.plan.search.task import Devices, Task
from bytescale_ext.plan.setup.memory import stage_state_bytes
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale import cli
from megatron.bytescale.cli.search.script import write_costs
from megatron.bytescale.cli.shared.model_flags import model_of
from tests.bytescale.cli.shared.test_launch_line import predicted
from tests.e2e.corpora import documents
from tests.e2e.training import MODEL, TRAIN

pytestmark = pytest.mark.ranks

CUT = MODEL.index("--seq-length")
SIZED = [*MODEL[:CUT], "--num-layers", "6"]
LENGTHS = [256, 3, 190, 130, 1, 17, 64, 40, 2, 100, 33, 65, 129, 8, 20, 50]
SPARSE = [*SIZED, *"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24".split()]


def task_of(flags: list[str]) -> Task:
    """Return the task of a model of these flags in float32."""
    model = model_of(flags, on_cuda=False)
    scaled = scaled_cost(shipped("h100_7b"), model.shape, 1)
    doubled = {"layer_bytes": 2 * scaled.layer_bytes, "recompute_bytes": 2 * scaled.recompute_bytes}
    cost = replace(scaled, dtype="float32", **doubled)
    return Task(cost, Devices(8, 8, 1e9, 1e7), 256, (tuple(LENGTHS),), model.operators)


TASK = task_of(SIZED)


def one_of(task: Task = TASK, **fields: object) -> Strategy:
    """Return the first strategy of the space with these fields."""
    for strategy in Space(tokens_per_rank=(64,)).strategies(task):
        if all(getattr(strategy, name) == value for name, value in fields.items()):
            return strategy
    raise AssertionError(fields)


def leaving(activations_gb: float, strategy: Strategy) -> Strategy:
    """Return a strategy with this device memory for activations next to the model states of the fullest stage."""
    states = max(stage_state_bytes(setup_of_strategy(TASK, strategy)))
    return replace(strategy, device_gb=round(states / 1e9 + activations_gb, 9))


LINES = {
    "priced": one_of(tensor_parallel=1, num_stages=2, activations=PRICED, shares_optimizer=False),
    "uneven": replace(one_of(tensor_parallel=1, num_stages=2, activations=FULL), stage_layers=(4, 2)),
    "slices": one_of(tensor_parallel=1, num_stages=2, chooses_slices=True, activations=KEEP),
    "virtual": one_of(tensor_parallel=1, num_stages=2, chunks=3),
    "slices-priced": leaving(2e-4, one_of(tensor_parallel=1, num_stages=2, chooses_slices=True, activations=PRICED)),
    "virtual-priced": leaving(3.5e-4, one_of(tensor_parallel=1, num_stages=2, chunks=3, activations=PRICED)),
    "block": replace(one_of(num_stages=2), activations=BLOCK, recomputed_layers=2),
    "experts": one_of(task_of(SPARSE), num_stages=2, expert_parallel=2),
}


@pytest.mark.parametrize("name", LINES)
def test_a_dry_run_says_the_same_of_the_line(name: str, tmp_path: Path) -> None:
    model = SPARSE if name == "experts" else SIZED
    task, strategy = task_of(model), LINES[name]
    write_costs(tmp_path / "cost.json", task, strategy)
    case = CostedStrategy.of(task, strategy)
    sizes = "--ckpt-format torch_dist --seq-length 256 --max-position-embeddings 256 --global-batch-size 16".split()
    flags = [*model, *TRAIN, *sizes, "--cost-file", str(tmp_path / "cost.json"), *strategy.flags()]
    found = predicted(flags, 8, LENGTHS)
    rows: list[dict[str, Any]] = found["memory_gb"]
    assert [row["layers"] for row in rows] == list(strategy.stage_layers)
    assert [row["states"] * 1e9 for row in rows] == pytest.approx(stage_state_bytes(case.forecast.setup))
    most = max(row["total"] for row in rows) * 1e9
    figures = case.run(LENGTHS)
    assert most == pytest.approx(case.step_bytes(LENGTHS))
    assert found["step"]["slices"] == str(case.planner(LENGTHS).slicing or ONE_SLICE)
    if strategy.activations != PRICED:  # the search counts full micro-batches, which the step may not have
        assert most <= figures.device_bytes * (1 + 1e-9)
    if name in ("slices-priced", "virtual-priced"):
        assert figures.host_bytes > 0
        assert max(row["host"] for row in rows) * 1e9 == pytest.approx(figures.host_bytes)
        assert (case.planner(LENGTHS).slicing in (None, ONE_SLICE)) == (strategy.chunks > 1)
    seconds = float(re.match(r"([\d.e+-]+) s predicted", found["step"]["time"]).group(1))  # type: ignore[union-attr]
    assert figures.seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.full
def test_the_written_script_trains_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cost(tmp_path / "cost.json", TASK.cost)
    words = ["search", "--model-flags", f"{' '.join(SIZED)} --cpu", "--lengths", f"{documents()}.idx",
             "--seq-length", "256", "--global-batch-size", "4", "--ranks", "2", "--device-memory-gb", "1",
             "--steps", "2", "--best", "1", "--cost-file", str(tmp_path / "cost.json"),
             "--verify", "1", "--json"]  # fmt: skip
    assert cli.main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["verified"]
    assert row["failure"] == ""
    assert row["seconds"] > 0
    # Model states alone are half of the memory. Activations are uncertain, because costs are not from this machine.
    assert row["gb"] == pytest.approx(row["predicted_gb"], rel=0.5)
