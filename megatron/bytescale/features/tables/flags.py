"""The flags that tables in host memory have in common: --PREFIX-cache-rows and its like."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Final

from bytescale_ext.config.memory.host_tables import HostTables
from bytescale_ext.measure.host_memory import free_host_bytes
from bytescale_ext.states.cache import POLICIES, CacheSettings
from megatron.bytescale.arguments.refusals import Refusal, refuse
from megatron.bytescale.features.activations.flags import local_processes

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


def cache_settings(args: Any, prefix: str, num_rows: int) -> HostTables:
    """Return the settings of a table of so many rows. Raises ValueError for values out of range."""
    share, policy, rate = (getattr(args, f"{prefix}_{key}") for key in ("cache_rows", "cache_policy", "lr"))
    bounds = {way: getattr(args, f"{prefix}_staleness_{way}") for way in ("read", "write")}
    if not 0 <= share <= 1:
        raise ValueError(f"--{prefix}-cache-rows {share:g} is not a share from 0 to 1")
    fresh_steps = getattr(args, f"{prefix}_staleness_warmup")
    for way, bound in {**bounds, "warmup": fresh_steps}.items():
        if bound < 0:
            raise ValueError(f"--{prefix}-staleness-{way} {bound} must be at least 0")
    if not 0 < rate < math.inf:
        raise ValueError(f"--{prefix}-lr {rate:g} must be positive")
    return HostTables(CacheSettings(int(share * num_rows), policy, bounds["read"], bounds["write"]), rate, fresh_steps)


def free_bytes_of_process(args: Any) -> float:
    """Return the host memory that is free for each process of this machine, beside ``--host-memory-gb``.

    Without limit in a dry run, which is of another machine.
    """
    if args.fake_process_group:
        return math.inf
    return max(0.0, free_host_bytes() / local_processes() - (args.host_memory_gb or 0.0) * 1e9)


def refusals_of_tables(feature: str, flag: str, is_on_host: Callable[[Any], bool]) -> tuple[Refusal, ...]:
    """Return what a feature refuses while it keeps tables in host memory, as ``flag`` says."""

    def row(what: str, instead: str, applies: Callable[[Any], bool]) -> Refusal:
        return refuse(f"{what} under {flag} host", feature, instead, lambda args: is_on_host(args) and applies(args))

    return (
        row("--fp16", "use --bf16: with a loss scale steps may be skipped", lambda a: a.fp16),
        row("--ckpt-format", "use torch_dist, which saves the rows of each rank",
            lambda a: a.ckpt_format != "torch_dist"),
        row("--async-save", "remove it: tables change while they would be saved", lambda a: a.async_save),
        row("--disable-gloo-process-groups", "remove it: rows are exchanged between hosts",
            lambda a: not (a.use_gloo_process_groups or a.fake_process_group)),
    )  # fmt: skip
