"""The step of one rank as plain data, and the settings by which every loader makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import numpy as np

from bytescale_ext.data.loading.planning import without_tables
from bytescale_ext.data.samples.answers import AnswerSource, with_answers_only
from bytescale_ext.data.samples.future import future_tokens, future_weights
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.data.samples.packed import PackedMicroBatch, TokenSource, with_gram_rows
from bytescale_ext.data.samples.units import Unit, units_of
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Which steps a loader makes, and how it reads this rank's part of them.

    Attributes:
        rank: HDP rank whose micro-batches are read.
        samples_per_step: samples of one step on all ranks, where ``tokens_per_step`` is None.
        schedule: (samples consumed before, samples of a step from then on), in place of ``samples_per_step``; empty:
            all steps have as many.
        tokens_per_step: most tokens of one step on all ranks, at least those of the longest sample; a step is the next
            samples up to it. None: samples are counted.
        consumed_samples: samples used before; the first step begins with the next one.
        first_step: ``step_index`` of the first step.
        cyclic: begin again at the end of the data (evaluation) instead of stopping.
        plan_ahead: steps made before they are asked for, at least 1.
        rows_multiple: rows of each micro-batch are padded to a multiple of this.
        vocab_size: token ids must be below it; None: not checked.
        pin_memory: keep micro-batches in page-locked memory (CUDA).
        slice_rule: how micro-batches are cut into slices, those of the plan if it names any; None: they stay whole.
        window: of layers with a sliding window, the most keys before its own that a token sees; None: none has one.
        future_tokens: tokens after the label that draft heads, or layers of multi-token prediction, guess.
        weighs_future: read the weights of their losses too (multi-token prediction).
        grams: of models with an n-gram memory, which rows belong to a token; None: there is no memory.

    Raises:
        ValueError: a number is out of range.
    """

    rank: int
    samples_per_step: int
    consumed_samples: int = 0
    first_step: int = 0
    cyclic: bool = False
    plan_ahead: int = 2
    rows_multiple: int = 1
    vocab_size: int | None = None
    pin_memory: bool = False
    slice_rule: SliceRule | None = None
    window: int | None = None
    schedule: tuple[tuple[int, int], ...] = ()
    tokens_per_step: int | None = None
    future_tokens: int = 0
    weighs_future: bool = False
    grams: GramRule | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank {self.rank}: give 0 or more")
        if self.samples_per_step < 1:
            raise ValueError(f"{self.samples_per_step} samples per step: give at least 1")
        if self.consumed_samples < 0:
            raise ValueError(f"consumed_samples {self.consumed_samples}: give 0 or more")
        if self.plan_ahead < 1:
            raise ValueError(f"plan_ahead {self.plan_ahead}: at least one step must be made ahead, give 1 or more")
        if self.rows_multiple < 1:
            raise ValueError(f"rows_multiple {self.rows_multiple}: give 1 or more")

    def sample_ids(self, consumed_samples: int, num_samples: int) -> tuple[int, ...] | None:
        """Return the step's samples after ``consumed_samples`` of ``num_samples``; None when too few are left.

        Samples are counted; ``samples_within`` counts tokens.
        """
        parts = [size for begin, size in self.schedule if begin <= consumed_samples]
        ids = range(consumed_samples, consumed_samples + (parts[-1] if parts else self.samples_per_step))
        if self.cyclic:
            return tuple(i % num_samples for i in ids)
        return tuple(ids) if ids.stop <= num_samples else None

    def units(self, plan: StepPlan) -> tuple[Unit, ...]:
        """Return this rank's micro-batches of a plan, or their slices, in running order."""
        assert 0 <= self.rank < plan.num_ranks, f"{self.rank=} {plan.num_ranks=}"
        rule = self.slice_rule
        if plan.slicing is not None:
            assert rule is not None, f"{plan.slicing=} {rule=}"
            rule = replace(rule, slicing=plan.slicing) if plan.slicing.num_slices > 1 else None
        return units_of(plan.ranks[self.rank], plan.lengths, self.rank, self.rows_multiple, rule, self.window)

    def read(
        self, units: Sequence[Unit], source: TokenSource, sample_ids: Sequence[int], lengths: Sequence[int]
    ) -> tuple[PackedMicroBatch, ...]:
        """Read the tokens of units; ``sample_ids`` and ``lengths`` of each sequence of their plan.

        Where the source knows which tokens are answers, only these have a loss.
        """
        packed = [unit.read(source, sample_ids, lengths, self.vocab_size) for unit in units]
        if isinstance(source, AnswerSource):
            packed = [with_answers_only(one, source, sample_ids) for one in packed]
        if self.future_tokens:
            where = (source, sample_ids, lengths)
            packed = [self._with_future(one, *where) for one in packed]
        if self.grams is not None:
            packed = [with_gram_rows(one, self.grams, source, sample_ids) for one in packed]
        return tuple(one.pinned() if self.pin_memory else one for one in packed)

    def _with_future(
        self, packed: PackedMicroBatch, source: TokenSource, sample_ids: Sequence[int], lengths: Sequence[int]
    ) -> PackedMicroBatch:
        """Return a unit with the tokens after its labels, and the weights of their losses if they are wanted."""
        where = (packed.micro_batch, source, sample_ids, lengths, packed.num_rows, self.future_tokens)
        weights = future_weights(*where) if self.weighs_future else None
        return replace(packed, future=future_tokens(*where), future_weights=weights)


def samples_within(num_tokens: int, consumed_samples: int, source: TokenSource) -> tuple[int, ...] | None:
    """Return the next samples up to so many tokens, at least one; None when the source ends before these tokens do."""
    left = num_tokens
    for sample in range(consumed_samples, len(source)):
        left -= source.length(sample)
        if left < 0:
            return tuple(range(consumed_samples, max(sample, consumed_samples + 1)))
    return None


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """One optimizer step of one rank. Plain data: Megatron saves it in checkpoints to run the step again.

    Attributes:
        step_index: number of the step, counted from the loader's ``first_step``.
        sample_ids: samples of the step on all ranks, in order. Entry ``seq`` is the plan's sequence ``seq``, unless
            the plan places parts of samples (``StepLoader``).
        plan: the plan of all ranks.
        micro_batches: this rank's micro-batches, or their slices, in running order; may be empty.
        plan_seconds: time for lengths, plan and check, in the background.
        read_seconds: time for reading and packing this rank's tokens, in the background.
        wait_seconds: time for which ``next()`` waited.
        fell_back: the planner ran out of time, so this is its simple plan.
        places: where the samples lie, which the remote loader needs to read them again: ``PLACE`` [n], else None.
        num_tokens: tokens of the step on all ranks.
        row_counts: rows of each of ``micro_batches``.
    """

    step_index: int
    sample_ids: tuple[int, ...]
    plan: StepPlan
    micro_batches: tuple[PackedMicroBatch, ...]
    plan_seconds: float = 0.0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0
    fell_back: bool = False
    places: np.ndarray | None = None
    num_tokens: int = field(init=False)
    row_counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(self.plan.lengths))
        object.__setattr__(self, "row_counts", tuple(packed.num_rows for packed in self.micro_batches))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence of the step."""
        return self.plan.lengths

    def __reduce__(self) -> tuple[type[StepBatch], tuple[object, ...]]:
        """Pickle and copy the fields, the plan without its tables."""
        values = (getattr(self, one.name) for one in fields(self) if one.init)
        return StepBatch, tuple(without_tables(one) if isinstance(one, StepPlan) else one for one in values)


class StepMaker(Protocol):
    """Makes each step of a loader."""

    def sample_ids(self, consumed_samples: int) -> tuple[int, ...] | None:
        """Return the next step's samples, None when not enough are left."""
        ...

    def step(self, step_index: int, sample_ids: tuple[int, ...], should_stop: Callable[[], bool]) -> StepBatch:
        """Plan one step and read this rank's part of it. If that blocks, raise soon after ``should_stop``."""
        ...

    def simple_step(self, batch: StepBatch) -> StepBatch:
        """Make the step of ``batch`` again by the planner's simple plan."""
        ...
