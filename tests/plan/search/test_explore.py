from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bytescale_ext.plan.search.costed import CostedStrategy
from bytescale_ext.plan.search.explore import (
    LEAST_GAIN,
    Exploration,
    ScoredStrategy,
    explore,
    fitting_cases,
    in_sizes,
    run_frontier,
    waiting_whole,
)
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import FULL, KEEP, PRICED
from bytescale_ext.plan.search.task import Task
from tests.plan.search.tasks import STEPS, random_task, small_task
from tests.sample import sampled, seeds

SMALL = Space(stages=(1,), tokens_per_rank=(1024, 2048), activations=(KEEP,))
PIPED = Space((1,), (1, 2), (1024,), (KEEP,), ("whole", "virtual"))
MIXED = Space((1, 2), (1, 2), (1024, 2048), (KEEP, FULL), ("whole", "slices"))
TASK = small_task()


@pytest.fixture(autouse=True)
def plan_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the figures of a step for the search and for the exhaustive run, because the planner is pure."""
    monkeypatch.setattr(CostedStrategy, "run", cache(CostedStrategy.run))


def last(task: Task, space: Space, count: int, opens_all: bool = False) -> Exploration:
    *_, found = explore([task], space.branches(task), count, opens_all)
    return found


def exhaustive(task: Task, space: Space) -> list[ScoredStrategy]:
    """Run every step of every fitting strategy, and return them by time, then in their order."""
    cases = fitting_cases(task, space.strategies(task), Exploration())
    scored = [ScoredStrategy(case.strategy, tuple(case.run(step) for step in task.steps), task) for case in cases]
    return sorted(scored, key=lambda one: one.seconds)


@pytest.mark.parametrize("seed", seeds(60))
def test_the_search_finds_what_running_everything_finds(seed: int) -> None:
    task = random_task(seed)
    space = SMALL if seed % 30 else PIPED
    everything = exhaustive(task, space)
    found, opened = last(task, space, 3), last(task, space, 3, opens_all=True)
    assert found.found == everything[:3]
    assert found.found == opened.found
    assert found.fitting <= opened.fitting == len(everything)
    assert opened.closed == []
    # Pruned strategies and branches are never better, because all of them were run here.
    ran = {one.strategy for one in found.found} | {one.case.strategy for one in found.waiting if one.steps}
    assert len(ran) == found.replayed
    worst = found.found[-1].seconds if found.found else 0.0
    assert all(one.seconds >= worst for one in everything if one.strategy not in ran)


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 0.5, 0.5), (1.0, 0.4, 1.2, 1.0)])
def test_unlike_devices_are_scored_by_their_speeds(speeds: tuple[float, ...]) -> None:
    """The search finds what running everything finds, and bounds hold."""
    for seed, space in ((3, SMALL), (4, SMALL), (30, PIPED)):
        equal = random_task(seed)
        task = replace(equal, devices=replace(equal.devices, speeds=speeds))
        everything = exhaustive(task, space)
        assert last(task, space, 3).found == everything[:3]
        assert {one.strategy for one in everything} == {one.strategy for one in exhaustive(equal, space)}
        for one in everything:
            case = CostedStrategy.of(task, one.strategy)
            bounds = [case.bound(step) for step in task.steps]
            assert all(bound <= step.seconds * (1 + 1e-9) for bound, step in zip(bounds, one.steps, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("activations", "memory_bytes"), [(KEEP, 1e9), (PRICED, 1e7)])
def test_slices_too(activations: str, memory_bytes: float) -> None:
    task = replace(small_task(memory_bytes=memory_bytes, host_bytes=1e7), steps=(STEPS[0][:4],))
    space = Space((1,), (2,), (2048,), (activations,), ("slices",), uneven=False)
    assert all(one.chooses_slices and one.activations == activations for one in space.strategies(task))
    found = last(task, space, 2).found
    assert len(found) == 2
    assert found == exhaustive(task, space)[:2]


@pytest.mark.parametrize("seed", sampled(range(5), [0, 1]))
def test_sizes_of_steps_compete_by_the_time_of_all_documents(seed: int) -> None:
    """The winners equal the winners of separate searches with steps of one size of the same documents."""
    drawn = random_task(seed)
    together = replace(drawn, steps=(drawn.steps[0] + drawn.steps[1],))
    tasks = in_sizes(together, (4, 8))
    assert tasks == [drawn, together]
    *_, seen = explore(tasks, SMALL.branches(drawn), 3)
    separate = [one for task in tasks for one in last(task, SMALL, 3).found]
    by_document = sorted(separate, key=lambda one: one.seconds / one.task.batch)
    times = [one.seconds / one.task.batch for one in seen.found]
    assert times == pytest.approx([one.seconds / one.task.batch for one in by_document[: len(times)]], rel=1e-12)
    assert len(times) == min(3, 2 * last(drawn, SMALL, 1, opens_all=True).fitting)
    if times:
        assert seen.found[0] == by_document[0]


@pytest.mark.slow
def test_branches_stay_closed_whose_bounds_are_above_what_is_found() -> None:
    space = Space(activations=(KEEP,), pipelines=("whole",))
    found = last(TASK, space, 1)
    assert 0 < len(found.closed) < found.branches == len(list(space.branches(TASK)))
    assert min(found.closed).seconds >= found.found[0].seconds
    assert found.fitting + found.unfit.total() < len(list(space.strategies(TASK)))


def test_an_interrupted_search_has_what_was_found() -> None:
    running = explore([TASK], SMALL.branches(TASK), 10)
    seen = next(running)
    while not seen.found:
        seen = next(running)
    running.close()
    assert seen.found[0] == last(TASK, SMALL, 1).found[0]


def test_what_does_not_fit_is_counted() -> None:
    none = small_task(memory_bytes=1e6)
    found = last(none, SMALL, 10)
    assert found.found == []
    assert found.unfit.total() == len(list(SMALL.strategies(none)))
    assert found.needed is not None
    needed, strategy = found.needed
    assert CostedStrategy.of(small_task(memory_bytes=needed), strategy).full_bytes[0] == needed


def test_figures_over_the_steps() -> None:
    scored = last(TASK, SMALL, 1).found[0]
    times = [step.seconds for step in scored.steps]
    assert scored.seconds == pytest.approx(sum(times) / len(times))
    assert min(times) < scored.slow_seconds <= max(times)
    assert scored.most("device_bytes") == max(step.device_bytes for step in scored.steps)


@cache
def opened(seed: int) -> Exploration:
    task = random_task(seed)
    *_, seen = explore([task], MIXED.branches(task), 2, opens_all=True)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(5))
def test_nothing_beats_the_frontier_by_more_than_the_least_gain(seed: int) -> None:
    seen = opened(seed)
    if not seen.found:
        return
    task = seen.found[0].task
    waiting = waiting_whole(seen, task.batch)
    ran = [one.scored for one in (*waiting, *run_frontier(seen, task.batch)) if one.scored is not None]
    known = [(one.most("device_bytes"), one.seconds) for one in (*seen.found, *ran)]
    for one in waiting:
        steps = tuple(one.case.run(step) for step in task.steps)
        scored = ScoredStrategy(one.case.strategy, steps, task)
        assert scored.most("device_bytes") == pytest.approx(one.case.full_bytes[0])
        least = min((seconds for most, seconds in known if most <= one.case.full_bytes[0]), default=None)
        assert least is not None
        assert least * (1 - LEAST_GAIN) <= scored.seconds
    strategies = {one.case.strategy for one in waiting}
    assert {one.strategy for one in ran} <= strategies
    assert not any(one.chooses_slices for one in strategies)


@pytest.mark.slow
def test_what_is_slower_for_sure_is_not_replayed() -> None:
    scored = waiting = 0
    for seen in map(opened, range(5)):
        batch = seen.found[0].task.batch if seen.found else 0
        ran = {one.number: one for one in run_frontier(seen, batch)}
        scored += sum(one.scored is not None for one in ran.values())
        waiting += len(waiting_whole(seen, batch)) - len(ran)
    assert scored > 0
    assert waiting > 0
    seen = opened(0)
    assert list(run_frontier(seen, 1 + seen.found[0].task.batch)) == []
