"""Trainings on ghost GPUs: weights that are equal in every layout, and traces for ``order.py``."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.oracle import draw_weights_by_name
from tests.e2e.training import Outcome, train_ranks
from tests.ghost.devices import GHOST_GPUS
from tests.harness import ranks_on


def train_on_ghosts(num_ranks: int, *flags: object, traces: Path) -> list[Outcome]:
    """Train with equal weights on ghost GPUs, and write the trace of each rank to ``traces``."""
    with ranks_on(GHOST_GPUS):
        return _checked(train_ranks(num_ranks, *flags, entry=partial(train_traced, str(traces))))


def train_on_cpus(num_ranks: int, *flags: object) -> list[Outcome]:
    """Train with equal weights on CPU ranks."""
    return _checked(train_ranks(num_ranks, *flags, entry=train_drawn))


def _checked(outcomes: list[Outcome]) -> list[Outcome]:
    assert not any(outcome.code for outcome in outcomes), outcomes[0].text[-2000:]
    return outcomes


def train_drawn() -> None:
    """Entry with weights drawn by name."""
    import pretrain_gpt_hdp

    draw_weights_by_name()
    pretrain_gpt_hdp.main()


def train_traced(folder: str) -> None:
    """Entry with weights drawn by name. It writes the trace of this rank, and marks the beginning of each step.

    The last lines of the trace are the devices that this process has used.
    """
    from megatron.training import training

    from tests.ghost.environment import NUM_DEVICES
    from tests.ghost.trace import mark, runtime, trace_to

    train_step, steps = training.train_step, iter(range(1, 1000))

    def train_step_and_mark(*args: Any, **kwargs: Any) -> Any:
        mark(f"STEP {next(steps)}")
        return train_step(*args, **kwargs)

    training.train_step = train_step_and_mark
    trace_to(Path(folder, f"rank{os.environ['RANK']}.trace"))
    try:
        train_drawn()
    finally:
        for device in range(NUM_DEVICES):
            if runtime().ghost_is_used(device):
                mark(f"DEVICE {device}")
        trace_to(None)
