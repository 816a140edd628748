"""Where weight gradients run in a pipeline whose backward passes are split (zero bubble, Qi et al. 2023).

A backward pass computes the gradients of its inputs alone, which the stage before waits for. The gradients of the
weights of its linear layers (W) need nothing from other stages: they run later, where the stage would be idle. Until
then a slice holds the inputs of its linear layers and the gradients of their outputs, about as much as its activations.

``defer`` keeps the order of forward and backward passes. While a stage waits for an input it runs the W that has waited
longest. It also runs W before a forward pass that would make it hold more slices than the limit. Forward passes, input
gradients and weight gradients count 1 each. With the limit of 1F1B's first stage this is ZB-H1 (section 2.2)::

    stage 0   F0 F1 -- B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    stage 1   -- F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

In simulations of the 7B model on samples of 8K to 128K, places by the cost of each slice gained no more. Backward
passes and W have one order on all stages, so the slices that a stage holds after a forward pass are among those that
the first stage holds there without W.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

WEIGHTS: Final = 2
"""The way of a row that computes weight gradients, after FORWARD (0) and BACKWARD (1)."""


def defer(orders: tuple[Ints, ...], most_units: int) -> tuple[Ints, ...]:
    """Return the order of each stage with the weight gradients of every unit, all after its backward pass.

    Args:
        orders: way, unit and chunk of each pass of each stage, without virtual stages: [passes, 3].
        most_units: how many units a stage may hold, each from its forward pass until its weight gradients.
    """
    stages = [_Stage(order.tolist(), most_units) for order in orders]
    stops: dict[tuple[int, int, int], int] = {}
    num_done = -1
    while num_done < len(stops):
        num_done = len(stops)
        for number in range(len(stages)):
            _run_what_can(stages, number, stops)
    assert not any(stage.passes for stage in stages), "stages wait for each other"
    return tuple(stage.finished() for stage in stages)


def _run_what_can(stages: list[_Stage], number: int, stops: dict[tuple[int, int, int], int]) -> None:
    """Run the passes of a stage until the input of one is missing."""
    passes = stages[number].passes
    while passes:
        way, unit, _ = passes[0]
        before = number + (1 if way else -1)
        if 0 <= before < len(stages) and (before, way, unit) not in stops:
            return
        stops[number, way, unit] = stages[number].run(stops.get((before, way, unit), 0))


class _Stage:
    """The clock of one stage, and its units whose weight gradients wait."""

    def __init__(self, passes: list[list[int]], most_units: int) -> None:
        self.passes = deque(passes)
        self.most_units = most_units
        self.clock = self.held = 0
        self.waiting: deque[int] = deque()
        self.rows: list[list[int]] = []

    def run(self, ready: int) -> int:
        """Run the next pass, whose input is ready then, after weight gradients that fit; return when it stops."""
        way, unit, _ = self.passes[0]
        while self.waiting and (self.clock < ready or (not way and self.held == self.most_units)):
            self._run_weights()
        self.clock = max(self.clock, ready) + 1
        self.rows.append(self.passes.popleft())
        if way:
            self.waiting.append(unit)
        else:
            self.held += 1
        return self.clock

    def _run_weights(self) -> None:
        self.rows.append([WEIGHTS, self.waiting.popleft(), 0])
        self.clock += 1
        self.held -= 1

    def finished(self) -> Ints:
        """Return all rows, the weight gradients that still wait at the end: [passes, 3]."""
        while self.waiting:
            self._run_weights()
        return np.array(self.rows, dtype=np.int64)
