"""The table of planners. To add one, write its function in a file of this folder and add a row to ``PLANNERS``.

The flag ``--hdp-balance``, ``bytescale plan --balance``, ``bytescale simulate --schedulers``, the page of flags
(``docs/reference/``) and the tests read the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from bytescale_ext.plan.hdp.algorithm2 import place_algorithm2
from bytescale_ext.plan.hdp.aligned.search import PipelinedPlacer
from bytescale_ext.plan.hdp.baselines import place_naive, place_static
from bytescale_ext.plan.hdp.deadline import ShouldStop
from bytescale_ext.plan.hdp.free.balance import place_balanced
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.step.placed import PlacedRanks


class Place(Protocol):
    """Places the sequences of one step, for problems that differ in slices and costs only.

    A placement may depend on the calls before it. Equal calls in equal order give equal placements.
    """

    def __call__(self, problem: Problem, thorough: bool) -> PlacedRanks:
        """Return a placement: with ``thorough`` the best that the planner finds, otherwise a quick one."""


def stateless(place: Callable[[Problem, ShouldStop], PlacedRanks]) -> Callable[[ShouldStop], Place]:
    """Return the placer of a pure function, which solves each problem afresh and ignores ``thorough``."""

    def placer(should_stop: ShouldStop) -> Place:
        def place_problem(problem: Problem, thorough: bool) -> PlacedRanks:
            return place(problem, should_stop)

        return place_problem

    return placer


@dataclass(frozen=True, slots=True)
class PlannerRow:
    """One planner.

    Attributes:
        name: name of the planner, as ``--hdp-balance`` takes it.
        summary: quantity that the planner balances, and how, as the end of the sentence "It balances ...".
        placer: makes the placer of one step; the placer raises OutOfTime once ``should_stop()`` is True.
        aligned: whether it can plan aligned slots; if not, it is refused for pipelines and expert parallelism.
        sliced: whether it takes the slicing of micro-batches into account; if not, it plans whole micro-batches.
    """

    name: str
    summary: str
    placer: Callable[[ShouldStop], Place]
    aligned: bool
    sliced: bool = False


PLANNERS: Final = (
    PlannerRow(
        "none",
        "tokens alone, with each document on the fewest ranks that hold it (ByteScale, Algorithm 1)",
        stateless(place_naive),
        aligned=True,
    ),
    PlannerRow("dp", "the work of ranks that run independently", stateless(place_balanced), aligned=False),
    PlannerRow(
        "pp",
        "the work of pipelines, or of ranks that share experts, slot by slot",
        PipelinedPlacer,
        aligned=True,
        sliced=True,
    ),
    PlannerRow(
        "bytescale",
        "work, with each document on the fewest ranks that hold it (ByteScale, Algorithm 2)",
        stateless(place_algorithm2),
        aligned=True,
    ),
)
"""Planners that are chosen by name."""

STATIC_MESH: Final = PlannerRow(
    "static", "nothing: static context parallelism, to compare with", stateless(place_static), aligned=True
)
"""The planner that is chosen by the width of the mesh, not by name."""


def planner_names() -> tuple[str, ...]:
    """Return the names of all planners in ``PLANNERS``."""
    return tuple(row.name for row in PLANNERS)


def planner_row(name: str) -> PlannerRow:
    """Return the planner of this name. Raises ValueError with all names if there is none."""
    for row in PLANNERS:
        if row.name == name:
            return row
    raise ValueError(f"balance {name!r} is unknown; choose one of {', '.join(planner_names())}")


def auto_balance(aligned: bool) -> str:
    """Return the name of the best planner for a step with or without aligned slots."""
    return "pp" if aligned else "dp"


def planner_help() -> str:
    """Return the help of a flag that chooses a planner."""
    summaries = "; ".join(f"{row.name}: {row.summary}" for row in PLANNERS)
    return (
        f"What the planner balances. {summaries}. auto (default): {auto_balance(aligned=True)} with pipeline or expert "
        f"parallelism, else {auto_balance(aligned=False)}."
    )
