"""Traces of requests for the tests of memory plans."""

from __future__ import annotations

import random

from bytescale_ext.plan.memory.plan import Request


def random_requests(dice: random.Random, count: int, largest: int = 6) -> list[Request]:
    starts = sorted(dice.randrange(10) for _ in range(count))
    return [Request(f"t{i}", dice.randint(1, largest), s, s + dice.randint(1, 6)) for i, s in enumerate(starts)]


def layer_trace(num_layers: int) -> list[Request]:
    """Return requests: two saved and three transient tensors per forward pass, two transient per backward pass."""
    requests, end = [], num_layers * 16
    for layer in range(num_layers):
        begin, back = layer * 8, end - (layer + 1) * 8
        requests += [
            Request("saved", 40, begin, back + 8), Request("a", 10, begin + 1, begin + 3),
            Request("b", 30, begin + 2, begin + 5), Request("saved too", 20, begin + 3, back + 4),
            Request("c", 20, begin + 4, begin + 6), Request("d", 50, back + 1, back + 5),
            Request("e", 30, back + 2, back + 8),
        ]  # fmt: skip
    return sorted(requests, key=lambda r: r.start)
