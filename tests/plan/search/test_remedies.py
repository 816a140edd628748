from __future__ import annotations

import re
from dataclasses import replace

from bytescale_ext.plan.search.explore import Exploration, explore, fitting_cases
from bytescale_ext.plan.search.remedies import remedies
from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import KEEP, PRICED
from bytescale_ext.plan.search.task import Task
from tests.plan.search.tasks import small_task

SPACE = Space(tensor_parallel=(1,), stages=(1,), tokens_per_rank=(1024,), activations=(KEEP,))


def fits(task: Task, space: Space) -> bool:
    return any(fitting_cases(task, space.strategies(task), Exploration()))


def test_the_device_memory_that_is_named_suffices() -> None:
    task = small_task(memory_bytes=5e6)
    *_, seen = explore([task], SPACE.branches(task))
    texts = remedies(task, SPACE, seen)
    assert re.match(r"0\.\d+ GB of device memory \(tp 1, pp 1, C 1024", texts[0])
    assert seen.needed is not None
    assert fits(small_task(memory_bytes=seen.needed[0]), SPACE)
    assert not fits(small_task(memory_bytes=seen.needed[0] - 1), SPACE)


def test_more_devices_and_a_shorter_context() -> None:
    """8 ranks need this C for the context, so more ranks, or a shorter context, need less memory."""
    space = replace(SPACE, tokens_per_rank=())
    needed = []
    for context in (65536, 32768):
        task = replace(small_task(), context=context)
        needed.append(min(case.full_bytes[0] for case in fitting_cases(task, space.strategies(task), Exploration())))
    between = sum(needed) / 2
    task = replace(small_task(memory_bytes=between), context=65536)
    *_, seen = explore([task], space.branches(task))
    assert seen.found == []
    texts = remedies(task, space, seen)
    assert "a context of 32768 tokens" in texts


def test_host_memory_helps_a_policy() -> None:
    space = replace(SPACE, activations=(PRICED,))
    sizes = [2e6 + 1e5 * tenth for tenth in range(200)]
    with_host = next(size for size in sizes if fits(small_task(memory_bytes=size, host_bytes=64e9), space))
    without = next(size for size in sizes if fits(small_task(memory_bytes=size), space))
    assert with_host < without
    task = small_task(memory_bytes=with_host)
    *_, seen = explore([task], space.branches(task))
    (text,) = [text for text in remedies(task, space, seen) if "host memory" in text]
    amount = float(text.split()[0]) * 1e9
    assert fits(small_task(memory_bytes=with_host, host_bytes=amount), space)


def test_only_device_memory_helps_where_there_is_next_to_none() -> None:
    task = small_task(memory_bytes=1e3)
    *_, seen = explore([task], SPACE.branches(task))
    (text,) = remedies(task, SPACE, seen)
    assert "GB of device memory" in text
