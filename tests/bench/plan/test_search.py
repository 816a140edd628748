"""Three other ways to choose a launch line, on a small task; the search is never slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.search.strategy import FULL, Strategy
from bytescale_ext.plan.search.task import Devices, Task
from scripts.bench.plan.search import compare, fitting, fixed_length, recipe, static, task_of, text_of
from tests.plan.search.tasks import COST, SHAPE

WIDE = replace(COST, shape=replace(SHAPE, num_layers=8, num_heads=8, num_kv_heads=8))
TASK = Task(WIDE, Devices(8, 8, 1e9), 4096, tuple((4000, 200, 900, 40, 2500, 700, 64, 1200) for _ in range(2)))


@pytest.mark.slow
def test_the_search_is_never_slower() -> None:
    choices = compare(TASK)
    assert set(choices) == {"recipe", "fixed-length search", "table", "search"}
    assert all(choice.seconds >= choices["search"].seconds for choice in choices.values())
    rows = text_of("a case", choices).splitlines()
    assert len(rows) == 4
    assert "| 1.00 |" in rows[-1]


def test_the_recipe_fills_a_node_first() -> None:
    assert recipe(TASK).strategy == Strategy(8, (8,), 4096, shares_optimizer=True)


@pytest.mark.slow
def test_samples_of_one_length_run_on_one_rank() -> None:
    case = fixed_length(TASK)
    assert case.strategy.tokens_per_rank == 4096
    assert case.planner.static_width == 1


def test_lines_recompute_if_memory_is_short() -> None:
    (plain,) = fitting(TASK, [(1, 1, 4)])
    tight = replace(TASK, devices=replace(TASK.devices, memory_bytes=plain.full_bytes[0] - 1))
    (full,) = fitting(tight, [(1, 1, 4)])
    assert full.strategy == replace(plain.strategy, activations=FULL)
    assert list(fitting(replace(tight, devices=Devices(8, 8, 1e5)), [(1, 1, 4)])) == []


def test_meshes_divide_the_ranks() -> None:
    assert static(TASK, Strategy(1, (8,), 1024)) is not None
    assert static(TASK, Strategy(4, (8,), 1024)) is None


@pytest.mark.parametrize("context", [65536, 262144])
def test_tasks_have_the_same_number_of_documents(context: int) -> None:
    task = task_of("byted", context)
    assert {len(step) for step in task.steps} == {512}
    assert max(map(max, task.steps)) <= context
