from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bytescale_ext.plan.search.case import Case, Task
from bytescale_ext.plan.search.explore import Exploration, Scored, explore, fitting_cases, in_sizes
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import KEEP, PRICED, Strategy
from tests.plan.search.tasks import STEPS, random_task, small_task

SMALL = Space(stages=(1,), tokens_per_rank=(1024, 2048), activations=(KEEP,))
PIPED = Space((1,), (1, 2), (1024,), (KEEP,), ("whole", "virtual"))
TASK = small_task()


@pytest.fixture(autouse=True)
def plan_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the figures of a step between the search and the run of everything: the planner is pure."""
    monkeypatch.setattr(Case, "run", cache(Case.run))


def last(task: Task, strategies: list[Strategy], count: int) -> Exploration:
    *_, found = explore([task], strategies, count)
    return found


def exhaustive(task: Task, strategies: list[Strategy]) -> list[Scored]:
    """Run every step of every strategy that fits; fastest first, ties in order."""
    cases = fitting_cases(task, strategies, Exploration())
    scored = [Scored(case.strategy, tuple(case.run(step) for step in task.steps), task) for case in cases]
    return sorted(scored, key=lambda one: one.seconds)


@pytest.mark.parametrize("seed", range(200))
def test_the_search_finds_what_running_everything_finds(seed: int) -> None:
    task = random_task(seed)
    strategies = list((SMALL if seed % 40 else PIPED).strategies(task))
    everything = exhaustive(task, strategies)
    found = last(task, strategies, 3)
    assert [one.seconds for one in found.found] == [one.seconds for one in everything[:3]]
    assert found.fitting == len(everything)
    # The pruned branches are never better: each of them was run here.
    pruned = {one.case.strategy for one in found.waiting if not one.steps}
    assert len(pruned) == found.fitting - found.replayed
    worst = found.found[-1].seconds if found.found else 0.0
    assert all(one.seconds >= worst for one in everything if one.strategy in pruned)


@pytest.mark.parametrize(("activations", "memory_bytes"), [(KEEP, 1e9), (PRICED, 1e7)])
def test_slices_too(activations: str, memory_bytes: float) -> None:
    task = replace(small_task(memory_bytes=memory_bytes, host_bytes=1e7), steps=(STEPS[0][:4],))
    strategies = list(Space((1,), (2,), (2048,), (activations,), ("slices",), uneven=False).strategies(task))
    assert all(one.chooses_slices and one.activations == activations for one in strategies)
    found = last(task, strategies, 2).found
    assert len(found) == 2
    assert found == exhaustive(task, strategies)[:2]


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_steps_compete_by_the_time_of_all_documents(seed: int) -> None:
    """The winners are those of separate searches, each in steps of one size of the same documents."""
    drawn = random_task(seed)
    together = replace(drawn, steps=(drawn.steps[0] + drawn.steps[1],))
    tasks = in_sizes(together, (4, 8))
    assert tasks == [drawn, together]
    strategies = list(SMALL.strategies(drawn))
    *_, seen = explore(tasks, strategies, 3)
    separate = [one for task in tasks for one in last(task, strategies, 3).found]
    by_document = sorted(separate, key=lambda one: one.seconds / one.task.batch)
    times = [one.seconds / one.task.batch for one in seen.found]
    assert times == pytest.approx([one.seconds / one.task.batch for one in by_document[: len(times)]], rel=1e-12)
    assert len(times) == min(3, 2 * seen.fitting)
    if times:
        assert seen.found[0] == by_document[0]


def test_each_size_cuts_the_same_documents() -> None:
    tasks = in_sizes(TASK, (2, 4, 8))
    assert [task.batch for task in tasks] == [2, 4, 8]
    assert len({tuple(length for step in task.steps for length in step) for task in tasks}) == 1


def test_equal_tasks_give_equal_results() -> None:
    strategies = list(SMALL.strategies(TASK))
    one, other = (last(TASK, strategies, 4) for _ in range(2))
    assert one.found == other.found
    assert (one.bounded, one.steps_run) == (other.bounded, other.steps_run)


def test_few_strategies_are_run() -> None:
    strategies = list(SMALL.strategies(TASK))
    found = last(TASK, strategies, 1)
    assert len(found.found) == 1
    assert found.replayed <= found.bounded <= found.fitting
    assert found.steps_run < len(TASK.steps) * found.fitting


def test_an_interrupted_search_has_what_was_found() -> None:
    running = explore([TASK], list(SMALL.strategies(TASK)), 10)
    seen = next(running)
    while not seen.found:
        seen = next(running)
    running.close()
    assert seen.found[0] == last(TASK, list(SMALL.strategies(TASK)), 1).found[0]


def test_what_does_not_fit_is_counted() -> None:
    none = small_task(memory_bytes=1e6)
    strategies = list(SMALL.strategies(none))
    found = last(none, strategies, 10)
    assert found.found == []
    assert found.unfit.total() == len(strategies)
    assert found.needed is not None
    needed, strategy = found.needed
    assert Case.of(small_task(memory_bytes=needed), strategy).full_bytes[0] == needed


def test_figures_over_the_steps() -> None:
    scored = last(TASK, list(SMALL.strategies(TASK)), 1).found[0]
    times = [step.seconds for step in scored.steps]
    assert scored.seconds == pytest.approx(sum(times) / len(times))
    assert min(times) < scored.slow_seconds <= max(times)
    assert scored.most("device_bytes") == max(step.device_bytes for step in scored.steps)
