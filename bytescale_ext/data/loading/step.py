"""One rank's step as plain data, and the settings of the loaders that make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from bytescale_ext.config.hdp import NORMALIZATIONS
from bytescale_ext.data.loading.prompts import SharedPrompts
from bytescale_ext.data.samples.answers import (
    GroupSource,
    RolloutSource,
    WeightSource,
    with_means,
    with_rollouts,
    with_weights,
)
from bytescale_ext.data.samples.future import future_tokens, future_weights
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.data.samples.packed import PackedMicroBatch, TokenSource, lengths_of, with_gram_rows
from bytescale_ext.data.samples.units import Unit, units_of
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.setup.forecast import StepTime
from bytescale_ext.plan.step.numbers import Numbers
from bytescale_ext.plan.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Selection of steps, and how a loader reads this rank's part of them.

    Attributes:
        rank: HDP rank whose micro-batches are read.
        samples_per_step: samples of one step on all ranks; unused with ``tokens_per_step``.
        consumed_samples: samples used before the first step.
        first_step: ``step_index`` of the first step.
        cyclic: whether to start again at the end of the data (evaluation) instead of stopping.
        plan_ahead: number of steps prepared ahead, at least 1.
        rows_multiple: number to whose multiple the rows of a micro-batch are padded.
        vocab_size: upper limit of token ids; None skips the check.
        pin_memory: whether micro-batches are in page-locked memory (CUDA).
        slice_rule: rule that splits micro-batches into slices, unless the plan has its own; None leaves them whole.
        window: number of earlier tokens that a token attends to in layers with a sliding window; None without them.
        schedule: (consumed samples, samples per step from then on), which replaces ``samples_per_step`` if not empty.
        tokens_per_step: limit of the tokens of one step on all ranks, at least the longest sample; a step takes as many
            of the next samples as fit. None counts samples instead.
        future_tokens: number of tokens after the label that draft heads or multi-token prediction predict.
        weighs_future: whether to read the weights of their losses too (multi-token prediction).
        grams: rule of the model's n-gram memory; None without one.
        normalization: divisor of the loss of a step, one of ``NORMALIZATIONS``.
        prompts: rule for groups whose prompt is computed once; None computes it with each answer. It needs a
            ``PromptSource``, and a model without windows and n-grams; groups in slices have no rings.

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
    normalization: str = NORMALIZATIONS[0]
    prompts: SharedPrompts | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank {self.rank}: give 0 or more")
        if self.samples_per_step < 1:
            raise ValueError(f"{self.samples_per_step} samples per step: give at least 1")
        if self.consumed_samples < 0:
            raise ValueError(f"consumed_samples {self.consumed_samples}: give 0 or more")
        if self.plan_ahead < 1:
            raise ValueError(f"plan_ahead {self.plan_ahead}: at least one step is prepared ahead, give 1 or more")
        if self.rows_multiple < 1:
            raise ValueError(f"rows_multiple {self.rows_multiple}: give 1 or more")

    def sample_ids(self, consumed_samples: int, num_samples: int) -> Sequence[int] | None:
        """Return the samples of the step after ``consumed_samples``, or None if too few of ``num_samples`` remain.

        This counts samples; ``samples_within`` counts tokens.
        """
        sizes = [size for begin, size in self.schedule if begin <= consumed_samples]
        ids = range(consumed_samples, consumed_samples + (sizes[-1] if sizes else self.samples_per_step))
        if self.cyclic:
            return Numbers(np.arange(ids.start, ids.stop) % num_samples)
        return Numbers(ids) if ids.stop <= num_samples else None

    def units(self, plan: StepPlan) -> tuple[Unit, ...]:
        """Return this rank's micro-batches of a plan, or their slices, in execution order."""
        assert 0 <= self.rank < plan.num_ranks, f"{self.rank=} {plan.num_ranks=}"
        rule = self.slice_rule
        if plan.slicing is not None:
            assert rule is not None, f"{plan.slicing=} {rule=}"
            rule = replace(rule, slicing=plan.slicing) if plan.slicing.num_slices > 1 else None
        return units_of(plan.ranks[self.rank], plan.lengths, self.rank, self.rows_multiple, rule, self.window)

    def read(
        self, units: Sequence[Unit], source: TokenSource, sample_ids: Sequence[int], lengths: Sequence[int]
    ) -> tuple[PackedMicroBatch, ...]:
        """Read the tokens of units. If the source is a ``WeightSource``, losses have its weights.

        Args:
            units: units of a plan.
            source: samples.
            sample_ids: sample of each sequence of the plan.
            lengths: tokens of each sequence of the plan.
        """
        batches = [unit.read(source, sample_ids, lengths, self.vocab_size) for unit in units]
        if isinstance(source, WeightSource):
            batches = [with_weights(packed, source, sample_ids) for packed in batches]
        if isinstance(source, RolloutSource):
            batches = [with_rollouts(packed, source, sample_ids) for packed in batches]
        if self.future_tokens:
            batches = [self._with_future(packed, source, sample_ids, lengths) for packed in batches]
        if self.normalization == "documents":
            batches = with_means(batches, source, sample_ids, lengths, lambda sample_id: (sample_id,))
        elif self.normalization == "groups":
            assert isinstance(source, GroupSource), f"{source=}"
            batches = with_means(batches, source, sample_ids, lengths, source.members)
        if self.grams is not None:
            batches = [with_gram_rows(packed, self.grams, source, sample_ids) for packed in batches]
        return tuple(packed.pinned() if self.pin_memory else packed for packed in batches)

    def _with_future(
        self, packed: PackedMicroBatch, source: TokenSource, sample_ids: Sequence[int], lengths: Sequence[int]
    ) -> PackedMicroBatch:
        """Return a micro-batch with the tokens after its labels and, for multi-token prediction, their weights."""
        inputs = (packed.micro_batch, source, sample_ids, lengths, packed.num_rows, self.future_tokens)
        weights = future_weights(*inputs) if self.weighs_future else None
        return replace(packed, future=future_tokens(*inputs), future_weights=weights)


def samples_within(num_tokens: int, consumed_samples: int, source: TokenSource) -> Sequence[int] | None:
    """Return the next samples with at most ``num_tokens`` tokens, but at least one sample.

    Returns None if the remaining samples of the source do not exceed ``num_tokens``.
    """
    remaining, first, size = num_tokens, consumed_samples, 1024
    while first < len(source):
        samples = range(first, min(first + size, len(source)))
        lengths = source.sample_lengths(samples) if isinstance(source, GroupSource) else lengths_of(source, samples)
        ends = np.cumsum(lengths)
        num_fitting = int(np.searchsorted(ends, remaining, side="right"))
        if num_fitting < len(ends):
            return Numbers(range(consumed_samples, max(first + num_fitting, consumed_samples + 1)))
        remaining -= int(ends[-1])
        first, size = first + len(ends), 2 * size
    return None


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """One optimizer step of one rank.

    Pickled, it is an empty tuple: Megatron saves the step that it will run again in the checkpoint before that step,
    and the loader of the resumed run begins with the same step.

    Attributes:
        step_index: number of the step, counted from the loader's ``first_step``.
        sample_ids: samples of the step on all ranks, in order. Sequence i of the plan is sample i of this list, unless
            the plan places parts of samples (``StepLoader``).
        plan: plan of all ranks.
        micro_batches: this rank's micro-batches, or their slices, in execution order; may be empty.
        plan_seconds: background time for lengths, plan and check.
        read_seconds: background time for reading and packing this rank's tokens.
        wait_seconds: time that ``next()`` waited.
        fell_back: whether this is the simple plan, because the planner ran out of time.
        places: locations of the samples, which the remote loader needs to read them again: ``PLACE`` [n], else None.
        references: log-probability of each document under a reference model, 0 without one: [documents]; None unless
            the source is a ``PairSource``.
        predicted: predicted time of the step; None if this process predicts nothing.
        shares_prompts: whether sequences of the plan are groups whose prompt is computed once, so the plan does not say
            how much they attend.
        num_tokens: tokens of the step on all ranks.
        row_counts: number of rows of each micro-batch or slice.
    """

    step_index: int
    sample_ids: Sequence[int]
    plan: StepPlan
    micro_batches: tuple[PackedMicroBatch, ...]
    plan_seconds: float = 0.0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0
    fell_back: bool = False
    places: np.ndarray | None = None
    references: np.ndarray | None = None
    predicted: StepTime | None = None
    shares_prompts: bool = False
    num_tokens: int = field(init=False)
    row_counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.plan.num_tokens)
        object.__setattr__(self, "row_counts", tuple(packed.num_rows for packed in self.micro_batches))

    def __copy__(self) -> StepBatch:
        return self  # Megatron keeps copies of what it may run again

    def __reduce__(self) -> tuple[type[tuple[()]], tuple[()]]:
        return tuple, ()

    @property
    def lengths(self) -> Sequence[int]:
        """Length of each sequence of the step in tokens."""
        return self.plan.lengths


class StepMaker(Protocol):
    """Makes the steps of a loader."""

    def sample_ids(self, consumed_samples: int) -> Sequence[int] | None:
        """Return the samples of the next step, or None if too few remain."""
        ...

    def step(self, step_index: int, sample_ids: Sequence[int], should_stop: Callable[[], bool]) -> StepBatch:
        """Plan one step and read this rank's part of it. If it blocks, it raises soon after ``should_stop``."""
        ...

    def simple_step(self, batch: StepBatch) -> StepBatch:
        """Make the step of ``batch`` again with the planner's simple plan."""
        ...
