"""Remedies if no strategy fits a task: the smallest change of each kind that helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from bytescale_ext.plan.search.explore import Exploration, fitting_cases
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.task import Task

DOUBLINGS: Final = 3
"""Number of times that devices and host memory are doubled, and contexts halved."""


def remedies(task: Task, space: Space, seen: Exploration) -> list[str]:
    """Return the changes with which some strategy fits, each with its figures; ``seen``: search without results."""
    changes = []
    if seen.needed is not None:
        needed, strategy = seen.needed
        changes.append(f"{needed / 1e9:.4g} GB of device memory ({strategy})")
    devices, host_bytes = task.devices, max(task.devices.host_bytes, 1e9)
    counts = (devices.count << power for power in range(1, DOUBLINGS + 1))
    hosts = (host_bytes * 2**power for power in range(DOUBLINGS + 1))
    contexts = (task.context >> power for power in range(1, DOUBLINGS + 1))
    more = _first(space, (replace(task, devices=replace(devices, count=count, speeds=())) for count in counts))
    if more is not None:
        changes.append(f"{more.devices.count} devices")
    hosted = _first(space, (replace(task, devices=replace(devices, host_bytes=size)) for size in hosts))
    if hosted is not None:
        changes.append(f"{hosted.devices.host_bytes / 1e9:.4g} GB of host memory for each process")
    shorter = _first(space, (_cut(task, context) for context in contexts if context))
    if shorter is not None:
        changes.append(f"a context of {shorter.context} tokens")
    return changes


def _first(space: Space, tasks: Iterable[Task]) -> Task | None:
    """Return the first task with a strategy that fits."""
    return next(
        (
            changed_task
            for changed_task in tasks
            if any(fitting_cases(changed_task, space.strategies(changed_task), Exploration()))
        ),
        None,
    )


def _cut(task: Task, context: int) -> Task:
    steps = tuple(tuple(min(length, context) for length in step) for step in task.steps)
    return replace(task, context=context, steps=steps)
