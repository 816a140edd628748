"""Compares the rows of ``gpu_activations.py`` with its targets. Pure: rows in, figures and a table out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SWEPT = "alpha "
"""Prefix of the names of the arms of the sweep; the alpha follows."""

PRICED = ("priced", "priced, no memory to spare")
"""Arms of the policy; the first that keeps as many layers whole as an arm of another method is compared with it."""

SPEED_TARGETS = {16384: 1.15, 131072: 1.25}
"""Smallest accepted speed-up of ``priced`` over full recompute, by tokens."""

IDEAL_TOKENS, IDEAL_EXCESS = 131072, 0.02
ALPHA_ERROR, LONGEST_FACTOR, PEAK_ERROR = 0.1, 4.0, 0.05


@dataclass(frozen=True)
class Verdict:
    """One target: the wanted and the measured figure, and whether the target is met."""

    what: str
    wanted: str
    measured: float
    is_met: bool


def arms_at(rows: Sequence[dict[str, Any]], num_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the rows of one length that ran, by arm."""
    return {row["arm"]: row for row in rows if row["num_tokens"] == num_tokens and "error" not in row}


def ideal_seconds(arms: dict[str, dict[str, Any]], layer_forward: float, num_layers: int) -> float | None:
    """Return the step time without recompute and transfers: of no policy, or full recompute less one forward pass."""
    if "none" in arms:
        return float(arms["none"]["step_seconds"])
    if "full recompute" not in arms:
        return None
    full = arms["full recompute"]
    return float(full["step_seconds"]) - (num_layers - full["whole_layers"]) * layer_forward


def fair_pair(arms: dict[str, dict[str, Any]], base: str) -> tuple[str, float] | None:
    """Return an arm of ``priced`` and its time relative to ``base``; both keep the same number of whole layers."""
    for name in PRICED:
        for other, row in arms.items():
            is_base = other == base or (other.startswith(f"{base}, ") and other.endswith(" layers whole"))
            if name in arms and is_base and row["whole_layers"] == arms[name]["whole_layers"]:
                return name, arms[name]["step_seconds"] / row["step_seconds"]
    return None


def swept_best(arms: dict[str, dict[str, Any]]) -> float | None:
    """Return the alpha of the fastest arm of the sweep that fitted in host memory."""
    swept = [row for name, row in arms.items() if name.startswith(SWEPT) and not row["overflowed_bytes"]]
    return min(swept, key=lambda row: row["step_seconds"])["alpha"] if swept else None


def longest(fits: Callable[[int], bool], first: int, most: int, granule: int) -> int:
    """Return the most tokens that fit, or 0: doubles from ``first`` on, then bisects to multiples of ``granule``."""
    low, high = 0, first
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    if high == most and fits(most):
        return most
    while high - low > granule:
        middle = (low + high) // (2 * granule) * granule
        if middle in (low, high):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def verdicts(
    rows: Sequence[dict[str, Any]],
    layer_forward: dict[int, float],
    num_layers: int,
    longest_tokens: dict[str, int],
) -> list[Verdict]:
    """Return the verdict on every target that these rows decide, by length.

    Args:
        rows: of one host budget.
        layer_forward: measured seconds of one layer's forward pass, by tokens.
        num_layers: of the model.
        longest_tokens: the longest trainable sequence, by arm.
    """
    found = []
    for tokens in sorted({row["num_tokens"] for row in rows}):
        found += _of_length(arms_at(rows, tokens), tokens, layer_forward.get(tokens), num_layers)
    if longest_tokens.get("none"):
        ratio = longest_tokens.get("priced", 0) / longest_tokens["none"]
        found.append(Verdict("longest sequence, priced over none", f">= {LONGEST_FACTOR:g}", ratio,
                             ratio >= LONGEST_FACTOR))  # fmt: skip
    return found


def _of_length(
    arms: dict[str, dict[str, Any]], tokens: int, layer_forward: float | None, num_layers: int
) -> list[Verdict]:
    found = []
    full, kept = (fair_pair(arms, base) for base in ("full recompute", "keep attention output"))
    if full and tokens in SPEED_TARGETS:
        speed, wanted = 1 / full[1], SPEED_TARGETS[tokens]
        found.append(Verdict(f"{tokens}: speed of {full[0]} over full recompute", f">= {wanted:g}", speed,
                             speed >= wanted))  # fmt: skip
    priced = arms.get("priced")
    ideal = ideal_seconds(arms, layer_forward, num_layers) if layer_forward is not None else None
    if priced and ideal and tokens == IDEAL_TOKENS:
        excess = priced["step_seconds"] / ideal - 1
        found.append(Verdict(f"{tokens}: priced over the ideal without transfers", f"<= {IDEAL_EXCESS:g}", excess,
                             excess <= IDEAL_EXCESS))  # fmt: skip
    if kept:
        what = f"{tokens}: {kept[0]} over keeping the attention output"
        found.append(Verdict(what, "<= 1", kept[1], kept[1] <= 1.0))
    best = swept_best(arms)
    if best is not None and "memo" in arms:
        error = abs(arms["memo"]["alpha"] - best)
        found.append(Verdict(f"{tokens}: predicted alpha against the swept best, {best:g}", f"<= {ALPHA_ERROR:g}",
                             error, error <= ALPHA_ERROR + 1e-9))  # fmt: skip
    for name, row in arms.items():
        if row.get("predicted_peak_gb") and row["peak_allocated_gb"]:
            error = row["predicted_peak_gb"] / row["peak_allocated_gb"] - 1
            found.append(Verdict(f"{tokens}: predicted device peak of {name}", f"within {PEAK_ERROR:g}", error,
                                 abs(error) <= PEAK_ERROR))  # fmt: skip
    return found


def table(found: Sequence[Verdict]) -> str:
    """Return a line for each target."""
    return "\n".join(
        f"{'met ' if one.is_met else 'MISS'} {one.what:62} wanted {one.wanted:12} measured {one.measured:8.4f}"
        for one in found
    )
