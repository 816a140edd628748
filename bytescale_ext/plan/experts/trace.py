"""Recorded loads of experts, in a JSONL file: a header line, and then one line per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.json_input import check_stored, json_settings, lines_of_text, stored_text
from bytescale_ext.plan.experts.placement import Ints


@dataclass(frozen=True)
class TraceHead:
    """Header of a trace, its first line.

    Attributes:
        experts: number of experts of each layer.
        topk: number of experts of each token.
        ranks: number of ranks that share the experts.
    """

    experts: int
    topk: int
    ranks: int


@dataclass(frozen=True)
class Trace:
    """Recorded loads.

    Attributes:
        head: sizes of the model, and the number of ranks.
        layers: numbers of the layers with experts.
        loads: tokens of each rank for each expert, [steps, layers, ranks, experts].
    """

    head: TraceHead
    layers: tuple[int, ...]
    loads: Ints


def head_of(path: Path) -> TraceHead:
    """Return the header of a trace. Raises ValueError if the file is not a trace, OSError if it cannot be read."""
    check_stored(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        return _head(path, _parsed(path, 1, file.readline()))


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ValueError, which names the invalid line, or OSError if the file cannot be read."""
    lines = lines_of_text(stored_text(path, "replace"))
    head = _head(path, _parsed(path, 1, lines[0] if lines else ""))
    rows = [_loads(path, number, _parsed(path, number, line), head) for number, line in enumerate(lines[1:], 2)]
    if not rows:
        raise ValueError(f"{path} has no steps")
    for number, row in enumerate(rows, 2):
        if row.keys() != rows[0].keys():
            raise ValueError(f"{path}:{number}: the layers differ from the layers of the first step")
    layers = tuple(sorted(rows[0]))
    loads = np.array([[row[layer] for layer in layers] for row in rows], np.int64)
    return Trace(head, layers, loads)


def _parsed(path: Path, number: int, line: str) -> Mapping[str, object]:
    """Return the JSON object of a line. Raises ValueError if the line is not a JSON object."""
    try:
        values = json_settings(line)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{path}:{number}: not a line of an expert trace")
    return values


def _head(path: Path, values: Mapping[str, object]) -> TraceHead:
    numbers = [values.get(name) for name in ("experts", "topk", "ranks")]
    sizes = [number for number in numbers if type(number) is int and number > 0]
    if len(sizes) < len(numbers) or sizes[0] % sizes[2]:
        raise ValueError(
            f"{path}:1: not the header of an expert trace: it needs experts, topk and ranks, and ranks must divide "
            "experts"
        )
    return TraceHead(*sizes)


def _loads(path: Path, number: int, values: Mapping[str, object], head: TraceHead) -> dict[int, Ints]:
    """Return the loads of one step by layer, each [ranks, experts]."""
    loads: dict[int, Ints] = {}
    layers = values.get("loads")
    if isinstance(layers, dict) and layers:
        for layer, rows in layers.items():
            if layer.isdecimal() and _are_counts(rows, head):
                loads[int(layer)] = np.array(rows, np.int64)
        if len(loads) == len(layers):
            return loads
    raise ValueError(
        f"{path}:{number}: the loads of each layer must be {head.ranks} rows of {head.experts} token counts"
    )


def _are_counts(rows: object, head: TraceHead) -> bool:
    """Return whether ``rows`` are valid loads of one layer."""
    if not isinstance(rows, list) or len(rows) != head.ranks:
        return False
    if any(not isinstance(row, list) or len(row) != head.experts for row in rows):
        return False
    return all(type(count) is int and 0 <= count < 1 << 40 for row in rows for count in row)
