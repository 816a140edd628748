"""Measure the moves of a paged step of the optimizer against their prediction, on links of several speeds, on CPU.

    OMP_NUM_THREADS=1 python scripts/bench/states/timeline.py [--parameters 20e6] [--repeats 5] [--wall]

The link copies at once, but each copy ends only when a link of its speed would have it done; who waits for it waits
that long. The first speed copies the gradients of a page in a quarter of its update, as fast links do; the second one
is a tenth of it. By default the clock is the processor's, so that other processes of the machine do not count: it
passes while the step computes and where it would wait, and leaves out what the copies themselves take, which a device
would do. With ``--wall`` the step sleeps instead, by the wall clock.

The rates of the prediction are measured in the steps of another, smaller optimizer, because Adam on a page alone or on
one that is in the cache runs at another speed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.activation.arena import HostArena  # noqa: E402
from bytescale_ext.activation.link import Pairs, PlainLink  # noqa: E402
from bytescale_ext.plan.states.moves import Kind  # noqa: E402
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds, replay, step_seconds  # noqa: E402
from scripts.bench.states.gpu_states import FLOAT_BYTES, HALF_BYTES, PagedArm  # noqa: E402

SHARES = (1.0, 0.1)
FETCHES_IN_UPDATE = 4  # at the first speed
CALIBRATION_SHARE = 0.5


@dataclass
class Clock:
    """Time of the step.

    Attributes:
        is_wall: waits are slept and the wall clock counts; else the processor's time and that of waits.
    """

    is_wall: bool
    _added: float = 0.0

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.perf_counter() if self.is_wall else time.thread_time() + self._added

    def leave_out(self, seconds: float) -> None:
        """Do not count this much processor time."""
        self._added -= seconds

    def wait_until(self, moment: float) -> None:
        """Let the time be ``moment`` at least."""
        missing = max(0.0, moment - self.now())
        if self.is_wall:
            time.sleep(missing)
        self._added += missing


@dataclass
class Arrival:
    """A ticket: the moment at which copies are done."""

    clock: Clock
    moment: float

    def synchronize(self) -> None:
        """Wait until then."""
        self.clock.wait_until(self.moment)


@dataclass
class SlowLink(PlainLink):
    """A link of a given speed each way, over which copies in one direction follow each other."""

    clock: Clock = field(default_factory=lambda: Clock(is_wall=False))
    bytes_per_second: float = math.inf
    _free: dict[Kind, float] = field(default_factory=dict)

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Any:
        """Copy to the host; of any shapes."""
        return self._copy(Kind.FETCH, pairs)

    def read(self, pairs: Pairs, written: object) -> Any:
        """Copy to the device; of any shapes."""
        return self._copy(Kind.RETURN, pairs)

    def wait(self, ticket: Any) -> None:
        """Let the step end after the last copy."""
        if ticket is not None:
            ticket.synchronize()

    def _copy(self, kind: Kind, pairs: Pairs) -> Arrival:
        begun = self.clock.now()
        super().write(pairs, [])
        self.clock.leave_out(self.clock.now() - begun)
        size = sum(destination.nbytes for destination, _ in pairs)
        self._free[kind] = max(begun, self._free.get(kind, 0.0)) + size / self.bytes_per_second
        return Arrival(self.clock, self._free[kind])


class TimedArm(PagedArm):
    """Parameters whose states are in pages, with a clock."""

    def __init__(self, num_parameters: int, page_bytes: int, clock: Clock) -> None:
        super().__init__(num_parameters, torch.device("cpu"), page_bytes)
        self._clock = clock

    def timed_step(self, bytes_per_second: float = math.inf) -> float:
        """Update over a link of this speed, and return the seconds of the step."""
        arena = HostArena(torch.empty(0, dtype=torch.uint8))
        self.adam.link = SlowLink(arena, clock=self._clock, bytes_per_second=bytes_per_second)
        begun = self._clock.now()
        self.step()
        return self._clock.now() - begun

    def adam_rate(self) -> float:
        """Return the bytes per second of Adam in a step that waits for no copy."""
        return ADAM_BYTES * sum(page.num_elements for page in self.adam.table.pages) / self.timed_step()


def measure(parameters: int, page_bytes: int, repeats: int, clock: Clock) -> list[dict[str, float]]:
    """Return a row for each speed of the link: medians of steps in turns, and predictions."""
    small, whole = (TimedArm(int(share * parameters), page_bytes, clock) for share in (CALIBRATION_SHARE, 1.0))
    whole.timed_step()
    first = FETCHES_IN_UPDATE * statistics.median(small.adam_rate() for _ in range(repeats)) * FLOAT_BYTES / ADAM_BYTES
    rates: list[float] = []
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(repeats):
        rates.append(small.adam_rate())
        for share in SHARES:
            seconds[share].append(whole.timed_step(share * first))
    rows = []
    for share, found in seconds.items():
        speeds = Speeds(share * first, statistics.median(rates))
        predicted = step_seconds(replay(whole.adam.table, HALF_BYTES, speeds))
        measured = statistics.median(found)
        rows.append({
            "share": share, "link_gb_per_second": share * first / 1e9,
            "adam_gb_per_second": speeds.adam_bytes_per_second / 1e9, "measured_seconds": measured,
            "predicted_seconds": predicted, "predicted_over_measured": predicted / measured,
        })  # fmt: skip
    return rows


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--parameters", type=float, default=20e6, help="(20e6)")
    parser.add_argument("--page-mb", type=float, default=4.0, help="size of a page in MiB (4)")
    parser.add_argument("--repeats", type=int, default=5, help="steps at each speed (5)")
    parser.add_argument("--wall", action="store_true", help="sleep, and measure by the wall clock")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = options(words)
    rows = measure(int(args.parameters), int(args.page_mb * 2**20), args.repeats, Clock(args.wall))
    for row in rows:
        print(
            f"link {row['link_gb_per_second']:6.2f} GB/s ({row['share']:g} of the first), Adam "
            f"{row['adam_gb_per_second']:.2f} GB/s: {1e3 * row['measured_seconds']:.1f} ms, predicted / measured "
            f"{row['predicted_over_measured']:.3f}, {row['measured_seconds'] / rows[0]['measured_seconds']:.2f} times "
            f"the first (predicted {row['predicted_seconds'] / rows[0]['predicted_seconds']:.2f})"
        )
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
