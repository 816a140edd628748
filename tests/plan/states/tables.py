"""Page tables for tests."""

from __future__ import annotations

import random

from bytescale_ext.plan.states.pages import PageTable, StateTensor, lay_out

PAGE_BYTES = 32  # eight elements
TENSORS = (
    StateTensor("a", 19, 0, True),
    StateTensor("b", 3, 0, True),
    StateTensor("c", 3, 1, True),
    StateTensor("d", 9, 0, True),
    StateTensor("e", 8, 0, False),
    StateTensor("f", 2, 0, True),
)
TABLE = lay_out(TENSORS, PAGE_BYTES)


def random_table(seed: int) -> PageTable:
    """Return the table of some tensors of 1 to 60 elements in three groups."""
    draw = random.Random(seed)
    tensors = [
        StateTensor(f"t{number}", draw.choice((1, 2, 5, 7, 8, 9, 16, 30, 60)), draw.randrange(3), draw.random() < 0.7)
        for number in range(draw.randrange(1, 12))
    ]
    return lay_out(tensors, draw.choice((4, 8, 32, 64)))
