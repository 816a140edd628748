"""Faults, and random points of a run at which they strike."""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_RANKS = 2
NUM_STEPS = 6
SAVE_INTERVAL = 2
LOSS_SECONDS = 5.0
MARKS = ("forward", "backward", "reduce", "end")
BATCH = 4
BATCH_OF_FULL_MICRO_BATCHES = 24  # full micro-batches show the speed of a rank
LAYOUTS = {
    "rings": "--hdp-tokens-per-rank 128 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "alone": "--hdp-tokens-per-rank 256",
    "stages": "--hdp-tokens-per-rank 256 --pipeline-model-parallel-size 2 --seq1f1b-slices 2",
}
FORMATS = ("torch", "torch_dist")


@dataclass(frozen=True)
class Fault:
    """A kind of failure.

    Attributes:
        text: name in the table.
        ends: whether the run cannot continue and must be started again.
        needs_root: whether it needs network namespaces or a file system of its own.
        layouts: keys of ``LAYOUTS`` that are tried.
        flags: additional flags; the reference run without a fault does not have them.
        tolerance: relative difference of losses from the reference run.
    """

    text: str
    ends: bool = True
    needs_root: bool = False
    layouts: tuple[str, ...] = ("rings", "stages")
    flags: str = ""
    tolerance: float = 1e-5


PAGES = "--state-policy paged --state-page-mb 0.00390625 --state-host-gb 7e-5 --state-nvme"
"""Flags that put most pages into a folder on a disk, which follows."""

FAULTS = {
    "killed": Fault("SIGKILL of a rank"),
    "killed-paged": Fault(
        "SIGKILL of a rank with pages on a disk, losses equal to the last bit", flags=PAGES, tolerance=0.0
    ),
    "stopped": Fault("SIGSTOP of a rank for longer than the timeout"),
    "cut-link": Fault("link of a rank cut", needs_root=True),
    "packet-loss": Fault(f"30 % packet loss for {LOSS_SECONDS:g} s", ends=False, needs_root=True),
    "slow": Fault("a node 3 times slower", ends=False, layouts=("alone",)),
    "full-disk": Fault("disk full during a save", needs_root=True),
    "killed-saving": Fault("SIGKILL of a rank in mid-save"),
    "cut-short": Fault("last checkpoint truncated, as by a host that goes down"),
    "planner": Fault("planner process killed", ends=False),
    "ray": Fault("Ray actor killed", ends=False, layouts=("rings",)),
}

FIRST_STEPS = {"cut-short": 5, "planner": 2}
"""First step of a fault: two checkpoints exist from step 5, a planner process from step 2."""


@dataclass(frozen=True)
class Point:
    """The moment at which a fault strikes.

    Attributes:
        fault: key of ``FAULTS``.
        number: number of the point, and its seed.
        step: iteration, from 1.
        rank: global rank.
        mark, nth: kind and number (from 0) of the clock's mark in the step, or the end of the step if there are fewer.
        delay: seconds after the mark.
        layout: key of ``LAYOUTS``.
        ckpt_format: Megatron's ``--ckpt-format``.
        share: share of a checkpoint that fits on the disk, or of a file that remains; 0 to 1.
    """

    fault: str
    number: int
    step: int
    rank: int
    mark: str
    nth: int
    delay: float
    layout: str
    ckpt_format: str
    share: float

    @property
    def batch(self) -> int:
        """Documents of a step."""
        return BATCH_OF_FULL_MICRO_BATCHES if self.fault == "slow" else BATCH

    @property
    def name(self) -> str:
        """Key of the result."""
        return f"{self.fault}-{self.number}"


def point_of(fault: str, number: int) -> Point:
    """Return the point of a fault with a number, which is always the same."""
    draw = random.Random(f"{fault} {number}")
    return Point(
        fault=fault,
        number=number,
        step=draw.randint(FIRST_STEPS.get(fault, 1), NUM_STEPS),
        rank=draw.randrange(NUM_RANKS),
        mark=draw.choice(MARKS),
        nth=draw.randint(0, 1),
        delay=draw.uniform(0.0, 0.02),
        layout=draw.choice(FAULTS[fault].layouts),
        ckpt_format=draw.choice(FORMATS),
        share=draw.random(),
    )
