"""Features that own streams have no races, and the detector sees each wait that is removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.training import train_ranks
from tests.ghost.cases import CASES, Case
from tests.ghost.devices import GHOST_GPUS, needs_ghosts
from tests.ghost.mutants import MUTANTS, Mutant
from tests.ghost.training import train_drawn
from tests.harness import ranks_on

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts]

NAMES = (
    "memo and pages",
    "memo in pipelines",
    "swapped keys",
    "priced activations",
    "rings, windows, sinks, loss in chunks",
    "gradients in host memory",
    "window of layers",
)
OWN_STREAMS = [case for case in CASES if case.name in NAMES]
# Uses of a gradient that autograd's engine tells the allocator about in C++, which no callback sees.
IN_THE_ENGINE = "core/distributed/distributed_data_parallel.py"


class Late:
    """Stands for a pool of threads whose work runs as late as it may: when its result is needed.

    A thread that happens to be early would order accesses that nothing else orders, and hide a race.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        assert num_threads == 1, "one thread keeps the order of its work"

    def submit(self, work: Callable[..., None], *args: object) -> Late.Result:
        return Late.Result(partial(work, *args))

    @dataclass
    class Result:
        """Work that runs once."""

        work: Callable[[], None] | None

        def result(self) -> None:
            work, self.work = self.work, None
            if work is not None:
                work()


def train_watched(mutant: Mutant | None) -> None:
    """Entry that prints the races of a training."""
    import bytescale_ext.states.gradients
    from tests.ghost.races import watch

    vars(bytescale_ext.states.gradients)["ThreadPoolExecutor"] = Late
    if mutant is not None:
        mutant.install()
    detector = watch()
    try:
        train_drawn()
    finally:
        for race in detector.races:
            print(f"RACE {race}")


def races_of(case: Case, folder: Path, corpus: Path, mutant: Mutant | None = None) -> list[str]:
    """Train two steps, and return the races of all ranks."""
    flags = [*case.argv(corpus, folder), "--train-iters", 2]
    with ranks_on(GHOST_GPUS):
        outcomes = train_ranks(case.num_ranks, *flags, entry=partial(train_watched, mutant))
    assert not any(outcome.code for outcome in outcomes), outcomes[0].text[-2000:]
    lines = [line for outcome in outcomes for line in outcome.text.splitlines()]
    return [line for line in lines if line.startswith("RACE ") and IN_THE_ENGINE not in line]


@pytest.mark.parametrize("case", OWN_STREAMS, ids=str)
def test_no_races(case: Case, corpus: Path, tmp_path: Path) -> None:
    assert races_of(case, tmp_path, corpus) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_removed_wait_is_found(mutant: Mutant, corpus: Path, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == mutant.case)
    assert races_of(case, tmp_path, corpus, mutant)
