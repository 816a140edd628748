"""Choice of the slices of each step within a budget of device memory: their number, their order and the kept keys.

More slices fill and drain a pipeline sooner and store fewer activations. The eager order waits less and stores more.
Kept keys travel only once but need memory, on the device or in host memory, and so do kept sums of their gradients. The
best choice depends on the lengths of the step. So a step is placed, every option is timed on that placement with the
longest keys that fit, and the step is placed again for the fastest options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.hdp.aligned.clock import run_pipelines, slot_seconds
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.hdp.table import Place
from bytescale_ext.plan.memory.held import PeakMemory, peak_memory
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ALL_SUMS, ONE_SLICE, Slicing

OPTIONS: Final = (
    ONE_SLICE,
    *(slicing for count in (2, 4, 8, 12) for slicing in (Slicing(count), Slicing(count).in_eager_order())),
)
"""Numbers of slices and orders that are tried, without kept keys."""

OPTIONS_WITH_HOST_MEMORY: Final = (*OPTIONS[:3], Slicing(3), Slicing(3).in_eager_order(), *OPTIONS[3:])
"""Options that are tried if keys may be swapped. With three slices more copies overlap than with four."""

TRIES: Final = 3
"""Number of the fastest options that are placed separately."""


@dataclass(frozen=True)
class SlicingChoice:
    """Chooses the slices of a step, as a pure function.

    Attributes:
        memory: memory of the pipeline's stages.
        device_bytes: budget of each device for everything that ``memory`` counts.
        options: slicings to choose from.
        host_bytes: host memory of each device for keys; 0 means that no keys are swapped.
    """

    memory: StageMemory
    device_bytes: float
    options: tuple[Slicing, ...] = OPTIONS
    host_bytes: float = 0.0

    @classmethod
    def within(cls, memory: StageMemory, device_bytes: float, host_bytes: float) -> SlicingChoice:
        """Return the choice among the options with swapped keys, or without them if ``host_bytes`` is 0."""
        return cls(memory, device_bytes, OPTIONS_WITH_HOST_MEMORY if host_bytes else OPTIONS, host_bytes)

    def __call__(self, problem: Problem, place: Place) -> tuple[Slicing, PlacedRanks]:
        """Return the slices of a step and its placement.

        Args:
            problem: step; its slicing is ignored.
            place: planner.

        Raises:
            OutOfTime: raised by ``place``. A choice from unfinished work would differ from rank to rank.
        """
        longest = int(problem.lengths.max(initial=0))
        first = replace(self.options[-1], kept_tokens=longest)
        placed = place(replace(problem, slicing=first), thorough=False)
        if not longest:
            return first, placed
        timed = self._timed_options(problem, placed)
        if min(timed).slicing.longest_kept < _longest_ring(placed):  # narrower rings keep fewer keys
            placed = place(replace(problem, slicing=self.options[-1]), thorough=False)
            timed += self._timed_options(problem, placed)
        for slicing in list(dict.fromkeys(candidate.slicing for candidate in sorted(timed)))[:TRIES]:
            timed += self._placed(problem, slicing, place, thorough=False)
        if (
            ONE_SLICE in self.options and min(timed).slicing.longest_kept < longest
        ):  # repeated transfers of keys cost more
            timed += self._placed(problem, ONE_SLICE, place, thorough=False)
        timed += self._placed(problem, min(timed).slicing, place, thorough=True)
        best = min(timed)
        return best.slicing, best.placed

    def _placed(self, problem: Problem, slicing: Slicing, place: Place, thorough: bool) -> list[TimedSlicing]:
        """Place a step in these slices, with the longest kept keys that fit. Returns None if the slices do not fit."""
        placed = place(replace(problem, slicing=slicing), thorough)
        fitted = self._fitted(problem, _table(problem, placed), slicing)
        return [TimedSlicing.of(replace(problem, slicing=option), placed) for option in fitted]

    def _timed_options(self, problem: Problem, placed: PlacedRanks) -> list[TimedSlicing]:
        """Time a placement in the fastest options that fit, with their longest kept keys.

        An option is fastest if all keys of rings are kept. Options that are too slow even then are skipped. If no
        option fits, the placement is timed in the option with the least memory.
        """
        table, longest = _table(problem, placed), _longest_ring(placed)
        all_kept = [replace(option, kept_tokens=longest if option.num_slices > 1 else 0) for option in self.options]
        timed: list[TimedSlicing] = []
        for ideal in sorted(TimedSlicing.of(replace(problem, slicing=slicing), placed) for slicing in all_kept):
            if len(timed) >= TRIES and sorted(timed)[TRIES - 1].seconds <= ideal.seconds:
                break
            for fitted in self._fitted(problem, table, ideal.slicing):
                timed.append(
                    ideal if fitted == ideal.slicing else TimedSlicing.of(replace(problem, slicing=fitted), placed)
                )
        if timed:
            return timed
        least = min(self.options, key=lambda option: self._bytes(problem, table, option))
        return [TimedSlicing.of(replace(problem, slicing=least), placed)]

    def _fitted(self, problem: Problem, table: ShardTable, option: Slicing) -> list[Slicing]:
        """Return an option with the longest keys that fit: with the sums of their gradients, and without all of them.

        All sequences up to a length keep their keys; with host memory, longer sequences keep them too. Returns None if
        the option does not fit at all.
        """
        in_rings = table.lengths[table.widths > 1] if option.num_slices > 1 else table.lengths[:0]
        lengths = [0, *np.unique(in_rings).tolist()]

        fits = partial(self._fits, problem, table)
        option = replace(option, summed_tokens=ALL_SUMS, swapped_tokens=0)
        with_sums = _longest(lengths, lambda most: replace(option, kept_tokens=most), fits)
        if with_sums is None or with_sums.kept_tokens == lengths[-1]:
            return [] if with_sums is None else [with_sums]
        keys = _longest(lengths, lambda most: replace(option, kept_tokens=most, summed_tokens=0), fits) or with_sums
        options = [with_sums]
        if keys.kept_tokens > with_sums.kept_tokens:
            options.append(_with_longest_sums(keys, lengths, fits))
        if self.host_bytes and keys.kept_tokens < lengths[-1]:
            options += self._swapped(problem, table, keys, lengths)
        return options

    def _swapped(self, problem: Problem, table: ShardTable, option: Slicing, lengths: Sequence[int]) -> list[Slicing]:
        """Return an option that swaps as many keys of the longest sequences as fit in host memory, or None.

        Keys of shorter sequences stay on the device as far as they fit, then sums of their gradients. ``lengths``:
        lengths of sequences in rings, ascending.
        """
        fits = partial(self._fits, problem, table)

        def fits_host(slicing: Slicing) -> bool:
            held_bytes = self._held(problem, table, slicing).host_bytes(self.memory)
            return held_bytes <= self.host_bytes and fits(slicing)

        swapped = replace(option, summed_tokens=0, swapped_tokens=lengths[-1])
        with_keys = _longest(lengths, lambda most: replace(swapped, kept_tokens=most), fits)
        if with_keys is None:
            return []
        with_sums = _with_longest_sums(with_keys, lengths, fits)
        longer = [length for length in lengths if length > with_sums.kept_tokens]
        swapping = _longest(longer, lambda most: replace(with_sums, swapped_tokens=most), fits_host)
        return [] if swapping is None else [swapping]

    def _fits(self, problem: Problem, table: ShardTable, slicing: Slicing) -> bool:
        return self._bytes(problem, table, slicing) <= self.device_bytes

    def _bytes(self, problem: Problem, table: ShardTable, slicing: Slicing) -> float:
        """Return the peak bytes of the fullest device."""
        return self._held(problem, table, slicing).device_bytes(self.memory)

    def _held(self, problem: Problem, table: ShardTable, slicing: Slicing) -> PeakMemory:
        # Among stages with equal layers, the first stores the most slices and the last has the logits. With swapped
        # keys, any stage may be the fullest.
        is_equal = len(set(self.memory.num_layers)) == 1 and not slicing.swapped_tokens
        stages = (0, len(problem.stages) - 1) if is_equal else None
        return peak_memory(table, slicing, problem.cost, self.memory, stages=stages)

    def check_fits(self, problem_cost: CostModel, num_tokens: int) -> None:
        """Raise ValueError if not even the option with the least memory fits, for micro-batches of ``num_tokens``."""
        table = full_micro_batches(4 * len(self.memory.num_layers), num_tokens)
        least = math.inf
        for option in reversed(self.options):  # more slices need less memory, so one of these options is often enough
            least = min(least, peak_memory(table, option, problem_cost, self.memory).device_bytes(self.memory))
            if least <= self.device_bytes:
                return
        raise ValueError(
            f"micro-batches of {num_tokens} tokens take at least {least / 1e9:.4g} GB of device memory in slices, "
            f"and --device-memory-gb is {self.device_bytes / 1e9:.4g}: give at least that, or fewer tokens"
        )


def full_micro_batches(count: int, num_tokens: int) -> ShardTable:
    """Return ``count`` micro-batches of one rank, each of one sequence of ``num_tokens`` tokens."""
    lengths = np.full(count, num_tokens, dtype=np.int64)
    zeros = np.zeros_like(lengths)
    placed = PlacedRanks(1, lengths, zeros, zeros + 1, np.arange(count), aligned=True)
    return ShardTable.of(StepPlan(1, num_tokens, tuple(lengths.tolist()), placed, aligned=True))


def _longest(
    lengths: Sequence[int], slicing_of: Callable[[int], Slicing], fits: Callable[[Slicing], bool]
) -> Slicing | None:
    """Return the slicing of the largest length that fits, or None. Larger lengths take more memory."""
    longest, low, high = None, 0, len(lengths) - 1
    number = high  # often all lengths fit
    while low <= high:
        slicing = slicing_of(lengths[number])
        if fits(slicing):
            longest, low = slicing, number + 1
        else:
            high = number - 1
        number = (low + high) // 2
    return longest


def _with_longest_sums(kept: Slicing, lengths: Sequence[int], fits: Callable[[Slicing], bool]) -> Slicing:
    """Return ``kept``, which keeps no sums, with kept sums of sequences up to the largest length that fits."""
    shorter = [length for length in lengths if length < kept.longest_kept]
    return _longest(shorter, lambda most: replace(kept, summed_tokens=most), fits) or kept


def _table(problem: Problem, placed: PlacedRanks) -> ShardTable:
    lengths = tuple(placed.lengths.tolist())
    return ShardTable.of(StepPlan(problem.num_ranks, problem.tokens_per_rank, lengths, placed, placed.aligned))


def _longest_ring(placed: PlacedRanks) -> int:
    """Return the tokens of the longest sequence on several ranks."""
    return int(placed.lengths[placed.widths > 1].max(initial=0))


@dataclass(frozen=True, order=True)
class TimedSlicing:
    """A placement in slices, ordered by the end of its last pipeline."""

    seconds: float
    slicing: Slicing = field(compare=False)
    placed: PlacedRanks = field(compare=False)

    @classmethod
    def of(cls, problem: Problem, placed: PlacedRanks) -> TimedSlicing:
        """Time a placement in the slices of a problem."""
        slots = slot_seconds(placed, problem.stage, problem.slicing)
        return cls(float(run_pipelines(slots, len(problem.stages)).max()), problem.slicing, placed)
