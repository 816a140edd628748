"""Choose the slices of each step under an activation policy, among those whose plans fit the memory of every stage.

What a policy keeps on the device, and how long it copies and rebuilds, depends on the slices: their tokens, how many
are in flight, and the keys that they hold. So each option comes with the cost of a stage that runs it under the policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.evaluate.slicing_choice import TRIES, Timed
from bytescale_ext.plan.hdp.problem import Problem
from bytescale_ext.plan.hdp.table import Place
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.sizes import Slicing

KEPT_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of the longest document: up to which length keys are kept, where the planner chooses slices under a policy."""


def policy_slicings(options: Iterable[Slicing], longest: int) -> list[Slicing]:
    """Return the slicings to choose from under a policy; only slices keep keys.

    Keys are kept of no document, of those up to a quarter or a half of ``longest`` tokens, or of all.
    """
    return [
        replace(option, kept_tokens=int(longest * share))
        for option in options
        for share in (KEPT_SHARES if option.num_slices > 1 else KEPT_SHARES[:1])
    ]


@dataclass(frozen=True)
class PolicyOption:
    """Slices in which the policy fits.

    Attributes:
        slicing: slices, with the longest document that keeps its keys.
        stage: cost of the slowest stage, with what the policy rebuilds and with copies that nothing hides.
    """

    slicing: Slicing
    stage: StageCost

    def of(self, problem: Problem) -> Problem:
        """Return a step in this slicing."""
        stage = self.stage.on(problem.stage.forward.nodes)
        return replace(problem, slicing=self.slicing, stages=(stage,) * len(problem.stages))

    def kept_of(self, problem: Problem) -> PolicyOption:
        """Return slices with the same placement of the step: no keys longer than its longest sequence are kept."""
        kept = min(self.slicing.kept_tokens, int(problem.lengths.max(initial=0)))
        return replace(self, slicing=replace(self.slicing, kept_tokens=kept))


@dataclass(frozen=True)
class PolicyChoice:
    """Chooses the slices of a step; calling it is pure.

    Attributes:
        fitting: the options, at least one; the last option has the most slices.
    """

    fitting: tuple[PolicyOption, ...]

    @property
    def options(self) -> tuple[Slicing, ...]:
        """Slicings that may be chosen."""
        return tuple(option.slicing for option in self.fitting)

    def __call__(self, problem: Problem, place: Place) -> tuple[Slicing, PlacedRanks]:
        """Return the slices of a step and its placement: the fastest option, after the best are placed separately.

        Args:
            problem: the step, whatever its slicing.
            place: the planner.

        Raises:
            OutOfTime: from ``place``.
        """
        last = self.fitting[-1]
        placed = place(last.kept_of(problem).of(problem), thorough=False)
        if not len(problem.lengths):
            return last.slicing, placed
        found, tried = self._timed(problem, placed), {last.kept_of(problem)}
        for _, option in sorted(found, key=_seconds)[:TRIES]:
            alike = option.kept_of(problem)
            if alike not in tried:  # else it would be placed as before
                tried.add(alike)
                found.append((Timed.of(option.of(problem), place(alike.of(problem), thorough=False)), option))
        _, option = min(found, key=_seconds)
        placed = place(option.kept_of(problem).of(problem), thorough=True)
        found.append((Timed.of(option.of(problem), placed), option))
        best, _ = min(found, key=_seconds)
        return best.slicing, best.placed

    def _timed(self, problem: Problem, placed: PlacedRanks) -> list[tuple[Timed, PolicyOption]]:
        """Time a placement in each option; those that keep the keys of the same rings take equally long."""
        rings = placed.lengths[placed.widths > 1]
        known: dict[PolicyOption, Timed] = {}
        found = []
        for option in self.fitting:
            longest = int(rings[rings <= option.slicing.kept_tokens].max(initial=0))
            alike = replace(option, slicing=replace(option.slicing, kept_tokens=longest))
            if alike not in known:
                known[alike] = Timed.of(alike.of(problem), placed)
            found.append((replace(known[alike], slicing=option.slicing), option))
        return found


def _seconds(found: tuple[Timed, PolicyOption]) -> float:
    return found[0].seconds
