"""Choose the slices of each step within a budget of device memory: how many, in which order, which keys are kept.

More slices fill and drain a pipeline sooner and hold fewer activations; the eager order waits less and holds more; kept
keys travel once and take memory, and so do kept sums of their gradients. Which pays depends on the lengths of the step.
So a step is placed, every option is timed on that placement with the longest keys that fit, and the step is placed
again for the fastest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.hdp.aligned.clock import run_pipelines, slot_seconds
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.memory.held import held
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ALL_SUMS, ONE_SLICE, Slicing

OPTIONS: Final = (
    ONE_SLICE,
    *(slicing for count in (2, 4, 8, 12) for slicing in (Slicing(count), Slicing(count).two_ahead())),
)
"""Numbers of slices and orders that are tried, without kept keys."""

TRIES: Final = 3
"""Of the fastest options, so many are placed by themselves."""

Place = Callable[[Problem], PlacedRanks]


@dataclass(frozen=True)
class SlicingChoice:
    """Chooses the slices of a step; calling it is pure.

    Attributes:
        memory: of the pipeline's stages.
        device_bytes: budget of each device, for all that ``memory`` counts.
        options: slicings to choose from.
    """

    memory: StageMemory
    device_bytes: float
    options: tuple[Slicing, ...] = OPTIONS

    def __call__(self, problem: Problem, place: Place) -> tuple[Slicing, PlacedRanks]:
        """Return the slices of a step and its placement.

        Args:
            problem: the step, whatever its slicing.
            place: the planner.

        Raises:
            OutOfTime: from ``place``. What was found so far is not taken: it would differ from rank to rank.
        """
        longest = int(problem.lengths.max(initial=0))
        first = replace(self.options[-1], kept_tokens=longest)
        placed = place(replace(problem, slicing=first))
        if not longest:
            return first, placed
        found = self._timed_options(problem, placed)
        if min(found).slicing.kept_tokens < _longest_ring(placed):  # narrower rings keep fewer keys
            placed = place(replace(problem, slicing=self.options[-1]))
            found += self._timed_options(problem, placed)
        for slicing in list(dict.fromkeys(one.slicing for one in sorted(found)))[:TRIES]:
            placed = place(replace(problem, slicing=slicing))
            fitted = self._fitted(problem, _table(problem, placed), slicing)
            found += [Timed.of(replace(problem, slicing=one), placed) for one in fitted]
        if (
            ONE_SLICE in self.options and min(found).slicing.kept_tokens < longest
        ):  # keys that travel again may cost more
            uncut = replace(problem, slicing=ONE_SLICE)
            whole = place(uncut)
            if self._fitted(problem, _table(problem, whole), ONE_SLICE):
                found.append(Timed.of(uncut, whole))
        best = min(found)
        return best.slicing, best.placed

    def _timed_options(self, problem: Problem, placed: PlacedRanks) -> list[Timed]:
        """Time a placement in every option that fits, with its longest kept keys; else in the one that holds least."""
        table = _table(problem, placed)
        found = [fitted for option in self.options for fitted in self._fitted(problem, table, option)]
        found = found or [min(self.options, key=lambda option: self._bytes(problem, table, option))]
        return [Timed.of(replace(problem, slicing=option), placed) for option in found]

    def _fitted(self, problem: Problem, table: ShardTable, option: Slicing) -> list[Slicing]:
        """Return an option with the longest keys that fit: with the sums of their gradients, and without all of them.

        Keys are kept of all sequences up to a length. Returns nothing where the option does not fit at all.
        """
        in_rings = table.lengths[table.widths > 1] if option.num_slices > 1 else table.lengths[:0]
        lengths = [0, *np.unique(in_rings).tolist()]

        def longest(lengths: Sequence[int], slicing_of: Callable[[int], Slicing]) -> Slicing | None:
            """Return the slicing of the greatest length that fits."""
            found, low, high = None, 0, len(lengths) - 1
            number = high  # often all fit
            while low <= high:
                tried = slicing_of(lengths[number])
                if self._bytes(problem, table, tried) <= self.device_bytes:
                    found, low = tried, number + 1
                else:
                    high = number - 1
                number = (low + high) // 2
            return found

        option = replace(option, summed_tokens=ALL_SUMS)
        with_sums = longest(lengths, lambda most: replace(option, kept_tokens=most))
        keys = longest(lengths, lambda most: replace(option, kept_tokens=most, summed_tokens=0))
        if with_sums is None or keys is None or keys.kept_tokens == with_sums.kept_tokens:
            return [] if with_sums is None else [with_sums]
        kept = keys
        shorter = [length for length in lengths if length < kept.kept_tokens]
        some_sums = longest(shorter, lambda most: replace(kept, summed_tokens=most))
        return [with_sums, some_sums or keys]

    def _bytes(self, problem: Problem, table: ShardTable, slicing: Slicing) -> float:
        """Return the most bytes of a device."""
        memory = self.memory
        # Of stages with equal layers the first one holds most slices, and the last one has the logits.
        stages = (0, len(problem.stages) - 1) if len(set(memory.num_layers)) == 1 else None
        return held(table, slicing, problem.cost, memory, stages=stages).device_bytes(memory)

    def check_fits(self, problem_cost: CostModel, num_tokens: int) -> None:
        """Raise ValueError where not even the option that holds least fits, for micro-batches of ``num_tokens``."""
        lengths = np.full(4 * len(self.memory.num_layers), num_tokens, dtype=np.int64)
        zeros = np.zeros_like(lengths)
        placed = PlacedRanks(1, lengths, zeros, zeros + 1, np.arange(len(lengths)), aligned=True)
        table = ShardTable.of(StepPlan(1, num_tokens, tuple(lengths.tolist()), placed, aligned=True))
        least = min(held(table, option, problem_cost, self.memory).device_bytes(self.memory) for option in self.options)
        if least > self.device_bytes:
            raise ValueError(
                f"micro-batches of {num_tokens} tokens take at least {least / 1e9:.4g} GB of device memory in slices, "
                f"and --device-memory-gb is {self.device_bytes / 1e9:.4g}: give at least that, or fewer tokens"
            )


def _table(problem: Problem, placed: PlacedRanks) -> ShardTable:
    lengths = tuple(placed.lengths.tolist())
    return ShardTable.of(StepPlan(problem.num_ranks, problem.tokens_per_rank, lengths, placed, placed.aligned))


def _longest_ring(placed: PlacedRanks) -> int:
    """Return the tokens of the longest sequence on several ranks."""
    return int(placed.lengths[placed.widths > 1].max(initial=0))


@dataclass(frozen=True, order=True)
class Timed:
    """A placement in slices, and when its last pipeline ends. The earliest is the least."""

    seconds: float
    slicing: Slicing = field(compare=False)
    placed: PlacedRanks = field(compare=False)

    @classmethod
    def of(cls, problem: Problem, placed: PlacedRanks) -> Timed:
        """Time a placement in the slices of a problem."""
        slots = slot_seconds(placed, problem.stage, problem.slicing)
        return cls(float(run_pipelines(slots, len(problem.stages)).max()), problem.slicing, placed)
