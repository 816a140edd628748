"""Recorded loads of experts: a file of JSON lines, a head and then one line for each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.plan.experts.placement import Ints


@dataclass(frozen=True)
class TraceHead:
    """What the loads are of, the first line of a trace.

    Attributes:
        experts: of each layer.
        topk: experts of each token.
        ranks: that share the experts.
    """

    experts: int
    topk: int
    ranks: int


@dataclass(frozen=True)
class Trace:
    """Recorded loads.

    Attributes:
        head: the model and its ranks.
        layers: the numbers of the layers with experts.
        loads: [steps, layers, ranks, experts] tokens of each rank for each expert.
    """

    head: TraceHead
    layers: tuple[int, ...]
    loads: Ints


def head_of(path: Path) -> TraceHead:
    """Return the head of a trace. Raises ValueError for a file that is none, OSError for one that cannot be read."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return _head(path, _parsed(path, 1, file.readline()))


def read_trace(path: Path) -> Trace:
    """Return a recorded trace. Raises ValueError naming the bad line, OSError for a file that cannot be read."""
    lines = path.read_text("utf-8", "replace").splitlines()
    head = _head(path, _parsed(path, 1, lines[0] if lines else ""))
    rows = [_loads(path, number, _parsed(path, number, line), head) for number, line in enumerate(lines[1:], 2)]
    if not rows:
        raise ValueError(f"{path} has no step")
    for number, row in enumerate(rows, 2):
        if row.keys() != rows[0].keys():
            raise ValueError(f"{path}:{number}: its layers are not those of the first step")
    layers = tuple(sorted(rows[0]))
    loads = np.array([[row[layer] for layer in layers] for row in rows], np.int64)
    return Trace(head, layers, loads)


def _parsed(path: Path, number: int, line: str) -> Mapping[str, object]:
    """Return the object of a line."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path}:{number}: not a line of a trace of experts")
    return found


def _head(path: Path, found: Mapping[str, object]) -> TraceHead:
    numbers = [found.get(name) for name in ("experts", "topk", "ranks")]
    sizes = [number for number in numbers if isinstance(number, int) and number > 0]
    if len(sizes) < len(numbers) or sizes[0] % sizes[2]:
        raise ValueError(f"{path}:1: not the head of a trace: experts, topk and the ranks that divide the experts")
    return TraceHead(*sizes)


def _loads(path: Path, number: int, found: Mapping[str, object], head: TraceHead) -> dict[int, Ints]:
    """Return the loads [ranks, experts] of a step by layer."""
    loads: dict[int, Ints] = {}
    layers = found.get("loads")
    if isinstance(layers, dict) and layers:
        for layer, rows in layers.items():
            if layer.isdecimal() and _are_counts(rows, head):
                loads[int(layer)] = np.array(rows, np.int64)
        if len(loads) == len(layers):
            return loads
    raise ValueError(
        f"{path}:{number}: loads must be, for each layer, {head.ranks} rows of {head.experts} numbers of tokens"
    )


def _are_counts(rows: object, head: TraceHead) -> bool:
    """Return whether these are the loads of one layer."""
    if (
        not isinstance(rows, list)
        or [isinstance(row, list) and len(row) for row in rows] != [head.experts] * head.ranks
    ):
        return False
    return all(type(count) is int and 0 <= count < 1 << 40 for row in rows for count in row)
