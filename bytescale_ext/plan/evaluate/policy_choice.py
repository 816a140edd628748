"""Choice of the slices of each step under an activation policy, among slices that fit the memory of every stage.

The slices determine what a policy keeps on the device, and the time of its copies and recomputations: through their
tokens, the number of slices in flight, and the keys that they store. So each option has its own stage cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.evaluate.slicing_choice import TRIES, TimedSlicing
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.hdp.table import Place
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Slicing

KEPT_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Length limits of documents that keep their keys, as fractions of the longest document, that are tried."""


def policy_slicings(options: Iterable[Slicing], longest: int) -> list[Slicing]:
    """Return the slicings to choose from under a policy. Only options with several slices keep keys.

    Keys are kept for no document, for documents up to a quarter or a half of ``longest`` tokens, or for all documents.
    """
    return [
        replace(option, kept_tokens=int(longest * share))
        for option in options
        for share in (KEPT_SHARES if option.num_slices > 1 else KEPT_SHARES[:1])
    ]


@dataclass(frozen=True)
class PolicyOption:
    """Slices that fit under the policy.

    Attributes:
        slicing: slices, with the length limit of documents that keep their keys.
        stage: cost of the slowest stage, with recomputation and with copies that do not overlap.
    """

    slicing: Slicing
    stage: StageCost

    def of(self, problem: Problem) -> Problem:
        """Return a step in this slicing."""
        stage = self.stage.on(problem.stage.forward.nodes)
        return replace(problem, slicing=self.slicing, stages=(stage,) * len(problem.stages))

    def kept_of(self, problem: Problem) -> PolicyOption:
        """Return the slices with length limits of at most the longest sequence, which gives the same placement."""
        kept = min(self.slicing.kept_tokens, int(problem.lengths.max(initial=0)))
        return replace(self, slicing=replace(self.slicing, kept_tokens=kept))


@dataclass(frozen=True)
class PolicyChoice:
    """Chooses the slices of a step, as a pure function.

    Attributes:
        fitting: options that fit, at least one; the last option has the most slices.
    """

    fitting: tuple[PolicyOption, ...]

    @property
    def options(self) -> tuple[Slicing, ...]:
        """Slicings that may be chosen."""
        return tuple(option.slicing for option in self.fitting)

    def __call__(self, problem: Problem, place: Place) -> tuple[Slicing, PlacedRanks]:
        """Return the slices of a step and its placement: the fastest option, after separate placement of the best few.

        Args:
            problem: step; its slicing is ignored.
            place: planner.

        Raises:
            OutOfTime: raised by ``place``.
        """
        last = self.fitting[-1]
        placed = place(last.kept_of(problem).of(problem), thorough=False)
        if not len(problem.lengths):
            return last.slicing, placed
        timed, placed_options = self._timed(problem, placed), {last.kept_of(problem)}
        for _, option in sorted(timed, key=_seconds)[:TRIES]:
            alike = option.kept_of(problem)
            if alike not in placed_options:  # otherwise its placement would be the same
                placed_options.add(alike)
                timed.append((TimedSlicing.of(option.of(problem), place(alike.of(problem), thorough=False)), option))
        _, option = min(timed, key=_seconds)
        placed = place(option.kept_of(problem).of(problem), thorough=True)
        timed.append((TimedSlicing.of(option.of(problem), placed), option))
        best, _ = min(timed, key=_seconds)
        return best.slicing, best.placed

    def _timed(self, problem: Problem, placed: PlacedRanks) -> list[tuple[TimedSlicing, PolicyOption]]:
        """Time a placement in each option. Options that keep the keys of the same rings have equal times."""
        rings = placed.lengths[placed.widths > 1]
        known: dict[PolicyOption, TimedSlicing] = {}
        timed = []
        for option in self.fitting:
            longest = int(rings[rings <= option.slicing.kept_tokens].max(initial=0))
            alike = replace(option, slicing=replace(option.slicing, kept_tokens=longest))
            if alike not in known:
                known[alike] = TimedSlicing.of(alike.of(problem), placed)
            timed.append((replace(known[alike], slicing=option.slicing), option))
        return timed


def _seconds(found: tuple[TimedSlicing, PolicyOption]) -> float:
    return found[0].seconds
