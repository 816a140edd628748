"""Imbalance of experts with which a step is planned, taken from steps that have already ended.

Every rank plans ahead without communication, and all plans must be equal. So the plan of step i uses the imbalance of
step i - lag and of a few steps before it, even if a rank already knows later steps. If the lag is one more than the
number of steps planned ahead, all ranks know these steps and none has to wait.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 8
"""Number of steps of the moving mean."""


class LoadHistory:
    """Imbalance of experts in the last steps. Training adds steps while the loader's thread reads.

    The imbalance of a step is the work of the experts of the slowest rank over the mean.
    """

    def __init__(self, lag: int, window: int = WINDOW) -> None:
        """Create a history; a step is planned with the mean over the ``window`` steps that end ``lag`` steps before."""
        assert lag > 0 and window > 0, f"{lag=} {window=}"
        self.lag, self.window = lag, window
        self._imbalances: dict[int, float] = {}

    @classmethod
    def planned_ahead(cls, plan_ahead: int) -> LoadHistory:
        """Return the history for a loader that prepares ``plan_ahead`` steps ahead.

        The loader plans step i when ``next()`` returns step i - plan_ahead. The step before that has ended by then.
        """
        return cls(plan_ahead + 1)

    def add(self, step_index: int, imbalance: float) -> None:
        """Record the imbalance of a step, which is equal on all ranks, before the next step is requested."""
        self._imbalances[step_index] = imbalance
        self._imbalances.pop(step_index - 2 * (self.lag + self.window), None)

    def at(self, step_index: int) -> float:
        """Return the imbalance with which a step is planned: the mean over the recorded steps of its window, or 1."""
        last = step_index - self.lag
        steps = range(last - self.window + 1, last + 1)
        known = [self._imbalances[step] for step in steps if step in self._imbalances]
        return sum(known) / len(known) if known else 1.0
