"""The order in which a pipeline stage works, which says what layer is read back from host memory next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bytescale_ext.plan.schedule.actions import Action


class WorkOrder:
    """The actions of one stage in one training step. A *unit*, one slice in one model chunk, is its forward action.

    Args:
        actions: in order, each forward before its backward.

    Attributes:
        running: the unit that ran forward last, or is running forward; None before the first.
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
            action: then._replace(kind="F")
            for action, then in pairwise(actions)
            if (action.kind, then.kind) == ("F", "B")
        }

    def begin_forward(self) -> None:
        """Go on to the next forward action."""
        assert self._forwards, "a step runs more forward passes than its order has"
        self.running = self._forwards.pop()

    @property
    def turns_around(self) -> bool:
        """Whether the backward pass of the running unit follows its forward pass at once."""
        return self.running is not None and self.after_forward() == self.running

    def after_forward(self) -> Action | None:
        """Return the unit that runs backward right after the running forward pass, or None."""
        return self._before_backward.get(self.running) if self.running is not None else None

    def after_backward(self, unit: Action) -> Action | None:
        """Return the unit whose backward pass is the next after that of ``unit``, or None."""
        return self._next_backward[unit._replace(kind="B")]
