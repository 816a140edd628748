"""Plans of a recording, made once for all ranks.

In training every rank makes each plan for itself, while it trains. Here two cores run all ranks, and planning has no
time in the replay.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.data.loading.planning import Planner
from bytescale_ext.new_file import new_file
from bytescale_ext.plan.step.plan import StepPlan


@dataclass(frozen=True)
class PlannedOnce:
    """A planner whose first caller among all ranks plans a step. The others read the plan from a file.

    Attributes:
        planner: planner, equal on all ranks.
        folder: folder of the recording.
    """

    planner: Planner
    folder: Path

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        """Return the plan of a step. Raises the planner's errors, on each rank that asks."""
        file = self.folder / f"{hashlib.sha256(np.array(lengths, dtype=np.int64).tobytes()).hexdigest()}.plan"
        with locked(self.folder):
            if not file.exists():
                plan = self.planner(lengths, should_stop)
                with new_file(file, is_binary=True) as stream:
                    pickle.dump(plan, stream)
        with file.open("rb") as stream:
            planned: StepPlan = pickle.load(stream)
        return planned

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        """Return the planner's simple plan."""
        return self.planner.fallback(lengths)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time inside."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
