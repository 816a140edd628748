"""Rows that tables read, and the times of the reads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bytescale_ext.config.memory.tables import HostTables
from bytescale_ext.states.cache import CacheSettings
from bytescale_ext.states.rows import RowTable
from megatron.bytescale.core.models.common.embeddings import host_table
from megatron.bytescale.core.models.common.embeddings.host_table import HostTable, TablesOfStep, in_thread
from tests.harness import run_ranks

DIM, NUM_ROWS, RATE = 3, 10, 0.1
FRESH = HostTables(CacheSettings(4), RATE)  # without staleness


class Owner(torch.nn.Module):
    """A module with a table."""

    def __init__(self, settings: HostTables = FRESH) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False)
        self.host = HostTable(settings, NUM_ROWS, lambda rows: RowTable.random(rows, DIM, 1.0, 0), torch.device("cpu"))


def step_of(*rows: int, number: int = 0) -> Any:
    return SimpleNamespace(rows=np.array(rows), step_index=number)


def train(rank: int, world: int, ahead: bool) -> tuple[list[torch.Tensor], dict[str, np.ndarray], int]:
    """Return the rows that a rank reads in three steps, its final rows, and the number of rows read ahead."""
    group = torch.distributed.group.WORLD
    host_table.parallel_state = SimpleNamespace(  # type: ignore[attr-defined]
        get_data_parallel_group_gloo=lambda with_context_parallel: group, get_tensor_model_parallel_rank=lambda: 0
    )
    model, read = torch.nn.Sequential(Owner(), torch.nn.Linear(1, 1)), []
    tables = TablesOfStep({Owner: lambda step: step.rows})
    tables.collect([model])
    steps = [step_of(0, rank + 1, 5), step_of(0, rank + 6), step_of(0, 7)]
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else None
        tables.begin(step, True, (lambda step=following: step) if ahead else None)
        tables.begin(step, True, pytest.fail)  # tokens of a second micro-batch
        values = model[0].host.values_of(torch.from_numpy(step.rows))
        (values * (rank + 1)).sum().backward()
        read.append(values.detach().clone())
        tables.end(torch.tensor(2.0))
    evaluated = step_of(0, 9)
    tables.begin(evaluated, False)
    read.append(model[0].host.values_of(torch.from_numpy(evaluated.rows)).detach())
    entries = model[0].host.sharded_entries("memory.")
    return read, {name: entry.data.numpy() for name, entry in entries.items()}, model[0].host._cache.traffic.num_staged


class Other(Owner):
    """A table of another feature."""


def steps_asked_for(rank: int, world: int) -> tuple[list[str], list[int], list[float]]:
    """Return the threads that ask for a next step while tables of two kinds are prefetched, rows read ahead, and the
    rows that each step reads.
    """
    group = torch.distributed.group.WORLD
    host_table.parallel_state = SimpleNamespace(  # type: ignore[attr-defined]
        get_data_parallel_group_gloo=lambda with_context_parallel: group
    )
    model, asked = torch.nn.Sequential(Owner(), Other()), []
    tables = TablesOfStep({Owner: lambda step: step.rows, Other: lambda step: step.rows + 1})
    tables.collect([model])

    def following() -> Any:
        asked.append(threading.current_thread().name)
        return step_of(5, 7)

    num_read = []
    for number in range(3):
        tables.begin(step_of(0, 1 + rank, number=number), True, following)
        for module in model:
            rows = module.host._step_rows
            module.host.values_of(torch.from_numpy(rows)).sum().backward()
        num_read.append(tables.end(torch.tensor(1.0)).rows_read)
        tables.begin(step_of(3, 4), False)  # an evaluation does not count
    return asked, [module.host._cache.traffic.num_staged for module in model], num_read


@pytest.mark.ranks
def test_one_thread_looks_ahead_for_all_tables() -> None:
    for asked, staged, num_read in run_ranks(steps_asked_for, 2):
        assert num_read == [6, 6, 6]  # two rows of each table; the second is a table of both kinds
        assert asked == ["bytescale-rows"] * 3
        assert min(staged) > 0


def late_bounds(rank: int, world: int) -> list[tuple[int, int]]:
    """Return the bounds of reads and writes in three steps; the second step is an evaluation."""
    group = torch.distributed.group.WORLD
    host_table.parallel_state = SimpleNamespace(  # type: ignore[attr-defined]
        get_data_parallel_group_gloo=lambda with_context_parallel: group
    )
    owner, found = Owner(HostTables(CacheSettings(4, "lru", 3, 5), RATE, fresh_steps=8)), []
    tables = TablesOfStep({Owner: lambda step: step.rows})
    tables.collect([owner])
    for number, training in ((7, True), (9, False), (8, True)):
        tables.begin(step_of(0, 1, number=number), training)
        found.append((owner.host._cache.settings.read_bound, owner.host._cache.settings.write_bound))
    return found


@pytest.mark.ranks
def test_rows_may_be_stale_after_the_first_steps_of_a_training() -> None:
    assert run_ranks(late_bounds, 1) == [[(0, 0), (0, 0), (3, 5)]]


@pytest.mark.ranks
def test_rows_that_come_ahead_are_those_of_the_table() -> None:
    found, expected = (run_ranks(train, 2, ahead) for ahead in (True, False))
    for (read, entries, staged), (others, others_entries, none) in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(read, others, strict=True))
        assert staged
        assert not none
        for name in ("memory.rows", "memory.squares"):
            assert (entries[name] == others_entries[name]).all()
    drawn = torch.from_numpy(RowTable.random(range(NUM_ROWS), DIM, 1.0, 0).values)
    assert torch.equal(found[0][0][0], drawn[[0, 1, 5]])
    # Row 0 has the gradients 1 and 2 of both ranks, divided by 2 labels, in each of three steps.
    steps = RATE * (1 + 1 / 2**0.5 + 1 / 3**0.5)
    assert found[1][0][-1][0].tolist() == pytest.approx((drawn[0] - steps).tolist(), abs=1e-6)


def test_an_error_of_a_thread_is_raised_where_its_result_is_asked_for() -> None:
    seen = []

    def fail() -> None:
        seen.append(threading.current_thread())
        raise OSError("the peer is gone")

    with pytest.raises(OSError, match="the peer is gone"):
        in_thread(fail).result(timeout=60)
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon
