"""The order of work of a pipeline stage, which determines the next layer to read back from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bytescale_ext.plan.schedule.actions import Action


class WorkOrder:
    """The actions of one stage in one training step.

    A *unit* is one slice in one model chunk. Its forward action identifies it.

    Args:
        actions: actions in order, each forward action before its backward action.

    Attributes:
        running: unit of the latest forward pass, finished or not; None before the first forward pass.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.running: Action | None = None
        self._forwards = [action for action in reversed(actions) if action.kind == "F"]
        self._next_backward: dict[Action, Action | None] = {}
        unit: Action | None = None
        for action in reversed(actions):
            self._next_backward[action] = unit
            unit = action._replace(kind="F") if action.kind == "B" else unit
        self._before_backward = {
            action: following._replace(kind="F")
            for action, following in pairwise(actions)
            if (action.kind, following.kind) == ("F", "B")
        }

    def begin_forward(self) -> None:
        """Advance to the next forward action."""
        assert self._forwards, "a step runs more forward passes than its order has"
        self.running = self._forwards.pop()

    @property
    def turns_around(self) -> bool:
        """Whether the backward pass of the running unit immediately follows its forward pass."""
        return self.running is not None and self.after_forward() == self.running

    def after_forward(self) -> Action | None:
        """Return the unit whose backward pass immediately follows the running forward pass, or None."""
        return self._before_backward.get(self.running) if self.running is not None else None

    def after_backward(self, unit: Action) -> Action | None:
        """Return the unit whose backward pass is the next after the backward pass of ``unit``, or None."""
        return self._next_backward[unit._replace(kind="B")]
