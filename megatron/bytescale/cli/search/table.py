"""The strategies of ``bytescale search`` as a table and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.search.explore import Exploration, ScoredStrategy
from megatron.bytescale.cli.shared.tables import aligned

PARTS: Final = {"compute": "computing", "exposed": "exchange", "idle": "waiting", "update": "update"}
"""Parts of the time of a step, and their names in the table."""

FULL_SHARE: Final = 0.95
"""Memory limits strategies that fill at least this share of the device."""

FREE_SHARE: Final = 0.03
"""Waits of up to this share of the time do not limit a strategy."""


@dataclass(frozen=True)
class StrategyRow:
    """Figures of a strategy: means over the steps, and peaks of memory.

    Attributes:
        strategy: short name of the strategy.
        flags: flags of the training.
        documents: documents of a step.
        seconds: seconds of a step.
        slow_seconds: 95th percentile of the seconds of a step.
        tokens_per_second: tokens per second of all devices.
        mfu: model FLOP/s as a share of the devices' peak; None if the peak is unknown.
        device_gb, host_gb: memory of a device, and host memory of a process.
        parts: seconds of each of ``PARTS``.
        binds: resource that limits the speed.
        loses: extra time over the fastest strategy, for the same number of documents.
    """

    strategy: str
    flags: str
    documents: int
    seconds: float
    slow_seconds: float
    tokens_per_second: float
    mfu: float | None
    device_gb: float
    host_gb: float
    parts: Mapping[str, float]
    binds: str
    loses: str


def strategy_rows(scored: Sequence[ScoredStrategy], peak_flops: float | None) -> list[StrategyRow]:
    """Return the rows of strategies, fastest first. ``peak_flops`` is the peak of one device in FLOP/s."""
    rows: list[StrategyRow] = []
    for result in scored:
        task, parts = result.task, {name: result.mean(name) for name in PARTS}
        tokens = sum(map(sum, task.steps)) / len(task.steps)
        flops = sum(model_flops(task.cost.shape, step) for step in task.steps) / len(task.steps)
        same_documents = scored[0].task.batch / task.batch  # steps with the documents of a step of the fastest
        device_bytes = result.most("device_bytes")
        row = StrategyRow(
            strategy=str(result.strategy),
            flags=" ".join(result.strategy.flags()),
            documents=task.batch,
            seconds=result.seconds,
            slow_seconds=result.slow_seconds,
            tokens_per_second=tokens / result.seconds,
            mfu=None if peak_flops is None else flops / result.seconds / peak_flops / task.devices.count,
            device_gb=device_bytes / 1e9,
            host_gb=result.most("host_bytes") / 1e9,
            parts=parts,
            binds=binds(parts, device_bytes / task.devices.memory_bytes),
            loses=loses({name: same_documents * seconds for name, seconds in parts.items()}, rows[0].parts)
            if rows
            else "",
        )
        rows.append(row)
    return rows


def binds(parts: Mapping[str, float], memory_share: float) -> str:
    """Return the resource that limits a strategy: its longest wait or computation, and memory if it is full."""
    total = sum(parts.values())
    waits = {name: seconds for name, seconds in parts.items() if name != "compute" and seconds > FREE_SHARE * total}
    longest = PARTS[max(waits, key=lambda name: waits[name])] if waits else "computing"
    return f"{longest}, memory" if memory_share >= FULL_SHARE else longest


def loses(parts: Mapping[str, float], best: Mapping[str, float]) -> str:
    """Return the loss to the best strategy and the part that loses most, for example ``+0.12 s (waiting +0.2)``."""
    longer = {name: parts[name] - best[name] for name in PARTS}
    total, most = sum(longer.values()), max(longer, key=lambda name: longer[name])
    return f"{total:+.3g} s ({PARTS[most]} {longer[most]:+.3g})" if any(longer.values()) else "equal"


def table_text(rows: Sequence[StrategyRow]) -> str:
    """Return the rows as a table."""
    heads = ("", "strategy", "documents", "s/step", "p95", "tokens/s", "MFU", "GB", "host GB", "waiting", "exchange",
             "update", "binds", "loses by")  # fmt: skip
    lines = [heads, *(_cells(number, row) for number, row in enumerate(rows, 1))]
    return "\n".join(aligned(lines, left={1, len(heads) - 2, len(heads) - 1}))


def _cells(number: int, row: StrategyRow) -> tuple[str, ...]:
    shares = (f"{row.parts[name] / row.seconds:.1%}" for name in ("idle", "exposed", "update"))
    return (str(number), row.strategy, f"{row.documents:,}", f"{row.seconds:.4g}", f"{row.slow_seconds:.4g}",
            f"{row.tokens_per_second:,.0f}", "-" if row.mfu is None else f"{row.mfu:.1%}", gb_text(row.device_gb),
            gb_text(row.host_gb), *shares, row.binds, row.loses)  # fmt: skip


def gb_text(gigabytes: float) -> str:
    """Return GB with one decimal, or with two digits where that would be 0.0."""
    return f"{gigabytes:.1f}" if gigabytes >= 1 or gigabytes == 0 else f"{gigabytes:.2g}"


def counts_text(exploration: Exploration) -> str:
    """Return the numbers of pruned, bounded and replayed strategies in one line."""
    num_unfit, num_opened = exploration.unfit.total(), exploration.branches - len(exploration.closed)
    unfit = ", ".join(f"{count:,} for {reason}" for reason, count in sorted(exploration.unfit.items()))
    return (
        f"{num_opened:,} of {exploration.branches:,} branches (tensor parallelism, stages, C, experts) were opened, "
        f"with {exploration.fitting + num_unfit:,} strategies: {num_unfit:,} do not fit ({unfit or 'none'}), "
        f"{exploration.bounded:,} were bounded, {exploration.replayed:,} planned and replayed, in "
        f"{exploration.steps_run:,} steps"
    )
