"""Simulate what zero bubble gains on pipelines in slices, within the same device memory (Qi et al. 2023, ZB-H1).

    .venv/bin/python scripts/bench/pipeline/zero_bubble.py

The backward pass of a slice is split into input gradients, which the previous stage needs, and weight gradients, which
can wait and fill idle time. Attention has no weights, so long sequences leave little work to move. The schedules are
those that training runs with ``--seq1f1b-zero-bubble``.

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
from dataclasses import astuple, dataclass, replace
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
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS  # noqa: E402
from bytescale_ext.plan.hdp.aligned.clock import slot_seconds  # noqa: E402
from bytescale_ext.plan.hdp.planner import HdpPlanner  # noqa: E402
from bytescale_ext.plan.schedule.actions import KINDS, Action, SliceSchedule, seq1f1b_schedule  # noqa: E402
from bytescale_ext.plan.schedule.compare import WEIGHT_SHARE  # noqa: E402
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


def step_seconds(schedule: SliceSchedule, units: Sequence[Unit]) -> float:
    """Return how long a step of one pipeline takes: ``simulate_slices`` in less time, for schedules that end."""
    columns = np.array([astuple(unit) for unit in units]).T.tolist()
    seconds = dict(zip(KINDS, columns, strict=False))
    left = [deque(row) for row in schedule.stages]
    clocks = [0.0] * len(left)
    stops: dict[tuple[int, Action], float] = {}
    while any(left):
        for stage, row in enumerate(left):
            while row and all(need in stops for need in needs(schedule, stage, row[0])):
                action = row.popleft()
                ready = max((stops[need] for need in needs(schedule, stage, action)), default=0.0)
                length = seconds[action.kind][action.micro_batch * schedule.num_slices + action.slice_index]
                clocks[stage] = stops[stage, action] = max(clocks[stage], ready) + length
    return max(clocks)


@dataclass(frozen=True)
class Arm:
    """One way to cut micro-batches: the units of each pipeline, and the most tokens that a first stage holds."""

    num_stages: int
    slicing: Slicing
    pipelines: tuple[tuple[Unit, ...], ...]

    def schedule(self, units: Sequence[Unit], zero_bubble: bool = False) -> SliceSchedule:
        """Return what the stages of one pipeline run."""
        slicing = replace(self.slicing, zero_bubble=zero_bubble)
        return seq1f1b_schedule(self.num_stages, len(units) // slicing.num_slices, slicing)

    @property
    def held_tokens(self) -> float:
        """The most that the first stage of any pipeline holds, and with zero bubble any stage."""
        return max(_most_tokens(self.schedule(units), units) for units in self.pipelines)

    def seconds(self, zero_bubble: bool = False) -> float:
        """Return how long a step takes."""
        units = self.pipelines if zero_bubble else [[unit.whole() for unit in one] for one in self.pipelines]
        return max(step_seconds(self.schedule(one, zero_bubble), one) for one in units)


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
        present = np.repeat(~slots.absent[:, rank], slicing.num_slices)
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
    plain, split = ({arm: arm.seconds(zero_bubble) for arm in arms} for zero_bubble in (False, True))
    whole = next(arm for arm in arms if arm.slicing.num_slices == 1)
    lean = next(arm for arm in arms if arm.slicing.num_slices == LEAN and not arm.slicing.eager)

    def gain(budget: float) -> float:
        fitting = [arm for arm in arms if held[arm] <= budget * (1 + EPSILON)]
        return 1 - min(split[arm] for arm in fitting) / min(plain[arm] for arm in fitting)

    return Gains(gain(held[lean]), gain(held[whole]), 1 - split[whole] / plain[whole])


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
