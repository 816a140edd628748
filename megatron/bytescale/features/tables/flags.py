"""The flags that tables in host memory have in common: --PREFIX-cache-rows and its like."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Final

from bytescale_ext.config.memory.host_tables import HostTables
from bytescale_ext.measure.host_memory import free_host_bytes, local_processes
from bytescale_ext.states.cache import POLICIES, CacheSettings
from megatron.bytescale.arguments.conditions import Condition, equals, given
from megatron.bytescale.arguments.refusals import Refusal, refuse

STORAGE: Final = ("device", "host")
FRESH_STEPS: Final = 100


def add_cache_arguments(group: argparse._ArgumentGroup, prefix: str, rate: float) -> None:
    """Add the flags of a cache and an optimizer of rows; ``rate``: the learning rate by default."""
    group.add_argument(
        f"--{prefix}-cache-rows",
        type=float,
        default=0.1,
        metavar="S",
        help="Rows in a rank's cache, of all rows (0.1).",
    )
    group.add_argument(
        f"--{prefix}-cache-policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="Which cached row makes room for another: the least recently used (lru, default), the least often used "
        "(lfu), or that but for rows that were used ten times (lfuopt).",
    )
    group.add_argument(
        f"--{prefix}-staleness-read",
        type=int,
        default=0,
        metavar="S",
        help="The most updates that a cached row may lack (0: every read is of the newest row).",
    )
    group.add_argument(
        f"--{prefix}-staleness-write",
        type=int,
        default=0,
        metavar="S",
        help="The most updates that wait in a cached row before they are sent (0: they are sent at once).",
    )
    group.add_argument(
        f"--{prefix}-staleness-warmup",
        type=int,
        default=FRESH_STEPS,
        metavar="N",
        help=f"The first steps of a training, in which both bounds are 0 ({FRESH_STEPS}): rows change most in them.",
    )
    group.add_argument(
        f"--{prefix}-lr", type=float, default=rate, metavar="R", help=f"Learning rate of Adagrad on rows ({rate:g})."
    )


@dataclass(frozen=True)
class CacheFlags:
    """The flags of one table's cache and optimizer of rows.

    Attributes:
        prefix: first word of the flags.
        share: rows in a rank's cache, as a share of all rows.
        policy: which cached row makes room for another.
        read_bound: most updates that a cached row may lack.
        write_bound: most updates that wait in a cached row.
        fresh_steps: first steps of a training, in which both bounds are 0.
        rate: learning rate.
    """

    prefix: str
    share: float
    policy: str
    read_bound: int
    write_bound: int
    fresh_steps: int
    rate: float

    def settings(self, num_rows: int) -> HostTables:
        """Return the settings of a table of so many rows. Raises ValueError for values out of range."""
        if not 0 <= self.share <= 1:
            raise ValueError(f"--{self.prefix}-cache-rows {self.share:g} is not a share from 0 to 1")
        for way, bound in (("read", self.read_bound), ("write", self.write_bound), ("warmup", self.fresh_steps)):
            if bound < 0:
                raise ValueError(f"--{self.prefix}-staleness-{way} {bound} must be at least 0")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"--{self.prefix}-lr {self.rate:g} must be positive")
        cache = CacheSettings(int(self.share * num_rows), self.policy, self.read_bound, self.write_bound)
        return HostTables(cache, self.rate, self.fresh_steps)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What else a run takes of host memory.

    Attributes:
        fake_process_group: the run is a dry run, which is of another machine.
        host_memory_gb: host memory of each process for activations.
    """

    fake_process_group: bool
    host_memory_gb: float | None


def free_bytes_of_process(memory: HostMemory) -> float:
    """Return the host memory that is free for each process of this machine, without ``--host-memory-gb``.

    Without limit in a dry run, which is of another machine.
    """
    if memory.fake_process_group:
        return math.inf
    return max(0.0, free_host_bytes() / local_processes() - (memory.host_memory_gb or 0.0) * 1e9)


def refusals_of_tables(feature: str, flag: str, is_on_host: Condition) -> tuple[Refusal, ...]:
    """Return what a feature refuses while it keeps tables in host memory, as ``flag`` says."""

    def row(what: str, instead: str, applies: Condition) -> Refusal:
        return refuse(f"{what} under {flag} host", feature, instead, is_on_host & applies)

    return (
        row("--fp16", "use --bf16: with a loss scale steps may be skipped", given("fp16")),
        row("--ckpt-format", "use torch_dist, which saves the rows of each rank", ~equals("ckpt_format", "torch_dist")),
        row("--async-save", "remove it: tables change while they would be saved", given("async_save")),
        row("--disable-gloo-process-groups", "remove it: rows are exchanged between hosts",
            ~(given("use_gloo_process_groups") | given("fake_process_group"))),
    )  # fmt: skip
