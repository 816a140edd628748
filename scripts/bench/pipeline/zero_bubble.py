"""Simulate what zero bubble would gain on pipelines in slices, within the same device memory (Qi et al. 2023, ZB-H1).

    .venv/bin/python scripts/bench/pipeline/zero_bubble.py

The backward pass of a slice is split into input gradients, which the previous stage needs, and weight gradients, which
can wait and fill idle time. Attention has no weights, so long sequences leave little work to move. Training has no such
schedule: docs/seq1f1b.md says what it would take.

The model is the 7B of ByteScale with the costs of its figures, launches included (``bytescale_7b``), on 4 and 8 stages.
Samples are of one length; documents are drawn from Byted's and GitHub's lengths and placed on 16 pipelines by our
planner, all keys kept. Within each budget both sides choose their best of 1, 2, 4, 8 and 12 slices, eager or not:

- *lean*: what 4 slices hold on the first stage;
- *memory of 1F1B*: what whole micro-batches hold there.

The last column is the gain where micro-batches stay whole. Rings couple pipelines by the time of the slowest in each
slot; that they also wait for each other is left out on both sides. It takes a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from bytescale_ext.measure.cost_file import shipped  # noqa: E402
from bytescale_ext.plan.cost.cost_model import StageCost  # noqa: E402
from bytescale_ext.plan.cost.slice_shares import SliceShares  # noqa: E402
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths  # noqa: E402
from bytescale_ext.plan.evaluate.schedulers import stage_costs  # noqa: E402
from bytescale_ext.plan.hdp.aligned.clock import slot_seconds  # noqa: E402
from bytescale_ext.plan.hdp.planner import HdpPlanner  # noqa: E402
from bytescale_ext.plan.hdp.slicing_choice import OPTIONS  # noqa: E402
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule, seq1f1b_schedule  # noqa: E402
from bytescale_ext.plan.schedule.simulate import needs  # noqa: E402
from bytescale_ext.plan.step.placed import PlacedRanks  # noqa: E402
from bytescale_ext.plan.step.sizes import Cluster, Slicing  # noqa: E402

Floats = npt.NDArray[np.float64]

K: Final = 1 << 10
M: Final = 1 << 20
NUM_PIPELINES: Final = 16
TOKENS_PER_RANK: Final = 8 * K
COUNTS: Final = (2, 4, 8, 16)
TARGET: Final = 0.03
LEAN: Final = 4
EPSILON: Final = 1e-9
WEIGHT_SHARE: Final = 0.5
"""Weight gradients' share of the linear part of a backward pass: one of two matrix products of equal size."""

Stops = dict[tuple[int, Action], float]
"""When each action of each stage stops."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One slice of one micro-batch on any stage: seconds of its passes, and the tokens that it holds until its last."""

    forward: float
    inputs: float
    weights: float
    tokens: float = 1.0

    @property
    def seconds(self) -> float:
        """All work of the unit on one stage."""
        return self.forward + self.inputs + self.weights

    def whole(self) -> Unit:
        """Return the unit with one backward pass."""
        return Unit(self.forward, self.inputs + self.weights, 0.0, self.tokens)


def zero_bubble_seconds(schedule: SliceSchedule, units: Sequence[Unit], most_held: float) -> float:
    """Return how long a step takes when weight gradients fill gaps; those of 0 seconds fill none.

    Each stage keeps the schedule's order. While it waits for an action's input it runs deferred weight gradients,
    oldest first, as long as half of one fits. It also runs them before a forward that would make it hold more than
    ``most_held`` tokens. A unit holds its tokens until its weight gradients are done: they need the inputs of all
    products, and the gradients of their outputs, which take the place of the other activations.
    """
    stages = [_Stage(most_held) for _ in schedule.stages]
    stops: Stops = {}
    num_done = -1
    while num_done < len(stops):
        num_done = len(stops)
        for number, stage in enumerate(stages):
            _run_what_can(schedule, number, stage, stops, units)
    return max(stage.clock + sum(unit.weights for unit in stage.waiting) for stage in stages)


def _run_what_can(schedule: SliceSchedule, number: int, stage: _Stage, stops: Stops, units: Sequence[Unit]) -> None:
    """Run the actions of a stage until the inputs of one are missing."""
    for action in schedule.stages[number][stage.num_done :]:
        before = list(needs(schedule, number, action))
        if not all(need in stops for need in before):
            return
        ready = max((stops[need] for need in before), default=0.0)
        unit = units[action.micro_batch * schedule.num_slices + action.slice_index]
        stops[number, action] = stage.run(action.kind == "F", unit, ready)


class _Stage:
    """The clock of one stage and its deferred weight gradients."""

    def __init__(self, most_held: float) -> None:
        self.clock = 0.0
        self.num_done = 0
        self.held = 0.0
        self.most_held = most_held
        self.waiting: deque[Unit] = deque()

    def run(self, is_forward: bool, unit: Unit, ready: float) -> float:
        """Run the next action after weight gradients that fit before it, and return when it stops."""
        while self.waiting and (
            self.clock + self.waiting[0].weights / 2 < ready
            or (is_forward and self.held + unit.tokens > self.most_held * (1 + EPSILON))
        ):
            done = self.waiting.popleft()
            self.clock += done.weights
            self.held -= done.tokens
        self.clock = max(self.clock, ready) + (unit.forward if is_forward else unit.inputs)
        self.num_done += 1
        if is_forward:
            self.held += unit.tokens
        else:
            self.waiting.append(unit)
        return self.clock


@dataclass(frozen=True)
class Arm:
    """One way to cut micro-batches: the units of each pipeline, and the most tokens that a first stage holds."""

    num_stages: int
    slicing: Slicing
    pipelines: tuple[tuple[Unit, ...], ...]

    def schedule(self, units: Sequence[Unit]) -> SliceSchedule:
        """Return what the stages of one pipeline run."""
        return seq1f1b_schedule(self.num_stages, len(units) // self.slicing.num_slices, self.slicing)

    @property
    def held_tokens(self) -> float:
        """The most that the first stage of any pipeline holds with whole backward passes."""
        return max(_most_tokens(self.schedule(units), units) for units in self.pipelines)

    def seconds(self, most_held: float | None = None) -> float:
        """Return how long a step takes; within a budget of tokens weight gradients fill gaps."""
        if most_held is None:
            whole = [[unit.whole() for unit in units] for units in self.pipelines]
            return max(zero_bubble_seconds(self.schedule(units), units, float("inf")) for units in whole)
        return max(zero_bubble_seconds(self.schedule(units), units, most_held) for units in self.pipelines)


def _most_tokens(schedule: SliceSchedule, units: Sequence[Unit]) -> float:
    held = most = 0.0
    for action in schedule.stages[0]:
        tokens = units[action.micro_batch * schedule.num_slices + action.slice_index].tokens
        held += tokens if action.kind == "F" else -tokens
        most = max(most, held)
    return most


def arm_of(placed: PlacedRanks, num_stages: int, stage: StageCost, slicing: Slicing) -> Arm:
    """Return the arm of one slicing: units as slow as their slowest partner, weight gradients of their own tokens."""
    slots = slot_seconds(placed, stage, slicing)
    forward, backward = slots.seconds
    tokens = _unit_tokens(placed, stage, slicing, len(forward))
    weights = np.minimum(WEIGHT_SHARE * stage.backward.b * tokens, backward)
    pipelines = []
    for rank in range(placed.num_ranks):
        columns = (forward, backward - weights, weights, tokens)
        present = ~slots.absent[:, rank]
        rows = zip(*(column[present, rank].tolist() for column in columns), strict=True)
        pipelines.append(tuple(Unit(*row) for row in rows))
    return Arm(num_stages, slicing, tuple(units for units in pipelines if units))


def _unit_tokens(placed: PlacedRanks, stage: StageCost, slicing: Slicing, num_units: int) -> Floats:
    """Return the tokens of each slice on each rank: [units, ranks]."""
    ranks, slots, seqs = placed.shards
    lengths, widths = placed.lengths.astype(np.float64), placed.widths.astype(np.float64)
    shares = SliceShares.of(stage.both, lengths, widths, slicing).tokens * (lengths / widths)[:, None]
    tokens = np.zeros((num_units, placed.num_ranks))
    for index, share in enumerate(shares.T):
        np.add.at(tokens, (slots * slicing.num_slices + index, ranks), share[seqs])
    return tokens


def samples(num_tokens: int, count: int) -> PlacedRanks:
    """Return one pipeline with ``count`` micro-batches of one sample each."""
    zeros = np.zeros(count, dtype=np.int64)
    return PlacedRanks(1, zeros + num_tokens, zeros, zeros + 1, np.arange(count), aligned=True)


def documents(name: str, context: int, count: int, stages: tuple[StageCost, ...]) -> PlacedRanks:
    """Return our placement of a step that fills about ``count`` micro-batches on each pipeline."""
    num_tokens = NUM_PIPELINES * TOKENS_PER_RANK * count
    lengths = sample_lengths(name, context, num_tokens, 0).tolist()
    planner = HdpPlanner(Cluster(NUM_PIPELINES, TOKENS_PER_RANK), stages, Slicing(LEAN, 2 * M), balance="pp")
    ranks = planner(lengths).ranks
    assert isinstance(ranks, PlacedRanks)
    return ranks


@dataclass(frozen=True)
class Gains:
    """Shares of a step that weight gradients in gaps save: within two budgets, and without slices."""

    lean: float
    roomy: float
    whole: float


def gains_of(placed: PlacedRanks, num_stages: int, stage: StageCost) -> Gains:
    """Return the gains of one setting."""
    kept = [replace(option, kept_tokens=2 * M) if option.num_slices > 1 else option for option in OPTIONS]
    arms = [arm_of(placed, num_stages, stage, option) for option in kept]
    held = {arm: arm.held_tokens for arm in arms}
    plain = {arm: arm.seconds() for arm in arms}
    whole = next(arm for arm in arms if arm.slicing.num_slices == 1)
    lean = next(arm for arm in arms if arm.slicing.num_slices == LEAN and not arm.slicing.eager)

    def gain(budget: float) -> float:
        fitting = [arm for arm in arms if held[arm] <= budget * (1 + EPSILON)]
        return 1 - min(arm.seconds(budget) for arm in fitting) / min(plain[arm] for arm in fitting)

    return Gains(gain(held[lean]), gain(held[whole]), 1 - whole.seconds(held[whole]) / plain[whole])


def rows() -> Iterator[tuple[str, int, int, Gains]]:
    """Yield (data, stages, micro-batches, gains) of every setting."""
    cost = shipped("bytescale_7b")
    for num_stages in (4, 8):
        stages = stage_costs(cost, num_stages)
        for count in COUNTS:
            for num_tokens in (8 * K, 32 * K, 128 * K):
                name = f"samples of {num_tokens // K}K"
                yield name, num_stages, count, gains_of(samples(num_tokens, count), num_stages, stages[0])
            for name in ("byted", "github"):
                placed = documents(name, 128 * K, count, stages)
                found = int(placed.counts.max())
                yield f"{name}, up to 128K", num_stages, found, gains_of(placed, num_stages, stages[0])


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| data | stages | micro-batches | gain, lean | gain, memory of 1F1B | gain without slices |")
    print("|---|---|---|---|---|---|")
    count = num_lean = num_roomy = 0
    for name, num_stages, num_micro_batches, gains in rows():
        shown = " | ".join(f"{gain:.1%}" for gain in (gains.lean, gains.roomy, gains.whole))
        print(f"| {name} | {num_stages} | {num_micro_batches} | {shown} |", flush=True)
        count, num_lean, num_roomy = count + 1, num_lean + (gains.lean >= TARGET), num_roomy + (gains.roomy >= TARGET)
    print(f"\nat least {TARGET:.0%}: {num_lean} of {count} settings, lean; {num_roomy} with the memory of 1F1B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
