"""Compares the rows of ``gpu_activations.py`` with its targets. Pure: rows in, figures and a table out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scripts.bench.report import Target

SWEPT = "alpha "
"""Prefix of the names of the arms of the sweep; the alpha follows."""

PRICED = ("priced", "priced, no memory to spare")
"""Arms of the policy. The first that keeps as many layers whole as an arm of another method is compared with it."""

SPEED_TARGETS = {16384: 1.15, 131072: 1.25}
"""Smallest accepted speed-up of ``priced`` over full recompute, by tokens."""

IDEAL_TOKENS, IDEAL_EXCESS = 131072, 0.02
ALPHA_ERROR, LONGEST_FACTOR, PEAK_ERROR = 0.1, 4.0, 0.05

Arms = dict[str, dict[str, Any]]
"""Rows of one length, by arm."""


def arms_at(rows: Sequence[dict[str, Any]], num_tokens: int) -> Arms:
    """Return the rows of one length without an error, by arm."""
    return {row["arm"]: row for row in rows if row["num_tokens"] == num_tokens and "error" not in row}


def ideal_seconds(arms: Arms, layer_forward: float, num_layers: int) -> float | None:
    """Return the step time without recompute and transfers: of no policy, or full recompute less one forward pass."""
    if "none" in arms:
        return float(arms["none"]["step_seconds"])
    if "full recompute" not in arms:
        return None
    full = arms["full recompute"]
    return float(full["step_seconds"]) - (num_layers - full["whole_layers"]) * layer_forward


def fair_pair(arms: Arms, base: str) -> tuple[str, float] | None:
    """Return an arm of ``priced`` and its time relative to ``base``; both keep the same number of whole layers."""
    for name in PRICED:
        for other, row in arms.items():
            is_base = other == base or (other.startswith(f"{base}, ") and other.endswith(" layers whole"))
            if name in arms and is_base and row["whole_layers"] == arms[name]["whole_layers"]:
                return name, arms[name]["step_seconds"] / row["step_seconds"]
    return None


def swept_best(arms: Arms) -> float | None:
    """Return the alpha of the fastest arm of the sweep that fits in host memory."""
    swept = [row for name, row in arms.items() if name.startswith(SWEPT) and not row["overflowed_bytes"]]
    return min(swept, key=lambda row: row["step_seconds"])["alpha"] if swept else None


def longest(fits: Callable[[int], bool], first: int, most: int, granule: int) -> int:
    """Return the largest number of tokens that fits, or 0: doubles from ``first``, then bisects to ``granule``."""
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
) -> list[Target]:
    """Return every target that these rows decide, by length.

    Args:
        rows: rows of one host budget.
        layer_forward: measured seconds of one layer's forward pass, by tokens.
        num_layers: layers of the model.
        longest_tokens: longest trainable sequence, by arm.
    """
    targets = []
    for tokens in sorted({row["num_tokens"] for row in rows}):
        targets += _of_length(arms_at(rows, tokens), tokens, layer_forward.get(tokens), num_layers)
    if longest_tokens.get("none"):
        ratio = longest_tokens.get("priced", 0) / longest_tokens["none"]
        targets.append(Target("longest sequence, priced over none", ratio, LONGEST_FACTOR))
    return targets


def _of_length(arms: Arms, tokens: int, layer_forward: float | None, num_layers: int) -> list[Target]:
    targets = []
    full, kept = (fair_pair(arms, base) for base in ("full recompute", "keep attention output"))
    if full and tokens in SPEED_TARGETS:
        text = f"{tokens}: speed of {full[0]} over full recompute"
        targets.append(Target(text, 1 / full[1], SPEED_TARGETS[tokens]))
    priced = arms.get("priced")
    ideal = ideal_seconds(arms, layer_forward, num_layers) if layer_forward is not None else None
    if priced and ideal and tokens == IDEAL_TOKENS:
        excess = priced["step_seconds"] / ideal - 1
        text = f"{tokens}: excess of priced over the ideal without transfers"
        targets.append(Target(text, excess, IDEAL_EXCESS, at_most=True))
    if kept:
        text = f"{tokens}: time of {kept[0]} over keeping the attention output"
        targets.append(Target(text, kept[1], 1.0, at_most=True))
    best = swept_best(arms)
    if best is not None and "memo" in arms:
        text = f"{tokens}: difference of the predicted alpha from the swept best, {best:g}"
        targets.append(Target(text, round(abs(arms["memo"]["alpha"] - best), 9), ALPHA_ERROR, at_most=True))
    for name, row in arms.items():
        if row.get("predicted_peak_gb") and row["peak_allocated_gb"]:
            error = abs(row["predicted_peak_gb"] / row["peak_allocated_gb"] - 1)
            targets.append(Target(f"{tokens}: error of the predicted device peak of {name}", error, PEAK_ERROR, True))
    return targets
