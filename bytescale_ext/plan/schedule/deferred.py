"""Deferred weight gradients in a pipeline with zero bubble (Qi et al. 2023).

A backward pass computes only the gradients of its inputs, because the previous stage waits for them. The gradients of
the weights of linear layers (W) need nothing from other stages, so they run later, while the stage would be idle. Until
then a slice holds the inputs and the output gradients of its linear layers, about as many bytes as its activations.

``insert_weight_gradients`` keeps the order of forward and backward passes. While a stage waits for an input, it runs
the W that has waited longest. It also runs W before a forward pass that would exceed the limit of slices. Forward
passes, input gradients and weight gradients take 1 unit of time each. With the limit of 1F1B's first stage the result
is ZB-H1 (section 2.2)::

    stage 0   F0 F1 -- B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    stage 1   -- F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

In simulations of the 7B model on samples of 8K to 128K tokens, placing W by the cost of each slice was not better.
Backward passes and W have the same order on all stages. So the slices that a stage holds after a forward pass are a
subset of the slices that the first stage holds there without W.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

WEIGHTS: Final = 2
"""The kind of a row of weight gradients, after FORWARD (0) and BACKWARD (1)."""


def insert_weight_gradients(orders: tuple[Ints, ...], max_units: int) -> tuple[Ints, ...]:
    """Return the order of each stage with the weight gradients of every unit after its backward pass: [rows, 3] each.

    Args:
        orders: kind, unit and chunk of the passes of each stage, without virtual stages: [passes, 3] each.
        max_units: limit of the units that a stage stores, each from its forward pass until its weight gradients.
    """
    stages = [_StageClock(order.tolist(), max_units) for order in orders]
    stops: dict[tuple[int, int, int], int] = {}
    num_done = -1
    while num_done < len(stops):
        num_done = len(stops)
        for number in range(len(stages)):
            _run_ready_passes(stages, number, stops)
    assert not any(stage.passes for stage in stages), "stages wait for each other"
    return tuple(stage.finished() for stage in stages)


def _run_ready_passes(stages: list[_StageClock], number: int, stops: dict[tuple[int, int, int], int]) -> None:
    """Run the passes of a stage until the input of a pass is missing. ``stops``: by stage, kind and unit."""
    passes = stages[number].passes
    while passes:
        kind, unit, _ = passes[0]
        source = number + (1 if kind else -1)
        if 0 <= source < len(stages) and (source, kind, unit) not in stops:
            return
        stops[number, kind, unit] = stages[number].run(stops.get((source, kind, unit), 0))


class _StageClock:
    """The clock of one stage, with the units that wait for their weight gradients."""

    def __init__(self, passes: list[list[int]], max_units: int) -> None:
        self.passes = deque(passes)
        self.max_units = max_units
        self.clock = self.num_held = 0
        self.waiting: deque[int] = deque()
        self.rows: list[list[int]] = []

    def run(self, ready: int) -> int:
        """Run the next pass, after the weight gradients that fit before ``ready``. Return the time of its end."""
        kind, unit, _ = self.passes[0]
        while self.waiting and (self.clock < ready or (not kind and self.num_held == self.max_units)):
            self._run_weights()
        self.clock = max(self.clock, ready) + 1
        self.rows.append(self.passes.popleft())
        if kind:
            self.waiting.append(unit)
        else:
            self.num_held += 1
        return self.clock

    def _run_weights(self) -> None:
        self.rows.append([WEIGHTS, self.waiting.popleft(), 0])
        self.clock += 1
        self.num_held -= 1

    def finished(self) -> Ints:
        """Run the weight gradients that still wait, and return all rows: [rows, 3]."""
        while self.waiting:
            self._run_weights()
        return np.array(self.rows, dtype=np.int64)
