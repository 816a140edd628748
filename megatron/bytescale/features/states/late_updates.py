"""Measures the delay of updates that overlap with training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.training.utils import print_rank_last

from megatron.bytescale.arguments.running import running_step
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.training import write_scalars


def tell_staleness(training: Training, runtime: Runtime) -> Training:
    """Log the number of steps whose gradients the parameters lack, and the time that steps wait for updates."""
    staleness = Staleness(runtime)

    def count_first(finalize: Callable[..., object]) -> Callable[..., object]:
        def count_and_finalize(*args: object, **kwargs: object) -> object:
            staleness.count()
            return finalize(*args, **kwargs)

        return count_and_finalize

    return training.wrap_finalize(count_first)


@dataclass
class Staleness:
    """Counts and logs the staleness of steps, which is equal on all ranks.

    Attributes:
        runtime: runtime of this process; its metrics contain the staleness of each step.
        counts: staleness of each step since the last log line.
        waited: total time waited until the last log line, in seconds.
    """

    runtime: Runtime
    counts: list[int] = field(default_factory=list)
    waited: float = 0.0

    def count(self) -> None:
        """Count a step after its passes and before its update."""
        late, step = self.runtime.parts.late_updates, running_step() + 1
        assert late is not None
        self.runtime.step.stale_steps = late.missing
        self.counts.append(late.missing)
        if step % self.runtime.run.process.log_interval:
            return
        mean, most, waited = sum(self.counts) / len(self.counts), max(self.counts), late.wait_seconds - self.waited
        each = 1000 * waited / len(self.counts)
        print_rank_last(
            f"> bytescale: parameters lacked the gradients of {mean:.2f} steps, {most} at most; "
            f"{each:.1f} ms of a step went to waiting for updates on this rank"
        )
        write_scalars({"states/stale steps": mean, "states/most stale steps": most, "states/waited ms": each}, step)
        self.counts, self.waited = [], late.wait_seconds
