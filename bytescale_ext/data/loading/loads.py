"""The load of experts with which a step is planned, taken from steps that have already ended.

Plans are made ahead, on every rank by itself, and must be equal. So the plan of step i counts with the loads of step
i - lag and some before it, whatever else a rank knows by then: with a lag of one step more than are planned ahead, all
ranks know these loads, and none waits for them.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 8
"""Steps of the moving mean."""


class LoadHistory:
    """The loads of the last steps. Training adds to them while the loader's thread reads.

    A load is the work of the experts of the slowest rank, as a multiple of the mean; 1 where none is known.
    """

    def __init__(self, lag: int, window: int = WINDOW) -> None:
        """``lag``: steps from the one that is planned to the last whose load counts; ``window``: steps that count."""
        assert lag > 0 and window > 0, f"{lag=} {window=}"
        self.lag, self.window = lag, window
        self._loads: dict[int, float] = {}

    @classmethod
    def planned_ahead(cls, plan_ahead: int) -> LoadHistory:
        """Return the history for a loader that makes so many steps ahead.

        It plans step i when step i - plan_ahead is handed out, so the step before that one has ended.
        """
        return cls(plan_ahead + 1)

    def add(self, step_index: int, load: float) -> None:
        """Note the load of a step when it ends, equal on all ranks, before the next step is asked for."""
        self._loads[step_index] = load
        self._loads.pop(step_index - 2 * (self.lag + self.window), None)

    def at(self, step_index: int) -> float:
        """Return the load with which a step is planned: the mean of those that are known, of the steps that count."""
        last = step_index - self.lag
        known = [self._loads[step] for step in range(last - self.window + 1, last + 1) if step in self._loads]
        return sum(known) / len(known) if known else 1.0
