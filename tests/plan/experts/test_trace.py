from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.plan.experts.trace import TraceHead, head_of, read_trace

HEAD = {"experts": 4, "topk": 2, "ranks": 2}
ROWS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def written(path: Path, *lines: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return file


def test_steps_and_layers_are_read(tmp_path: Path) -> None:
    steps = [{"step": step, "loads": {"10": ROWS, "2": [[step] * 4] * 2}} for step in (1, 2, 3)]
    trace = read_trace(written(tmp_path, HEAD, *steps))
    assert trace.head == TraceHead(4, 2, 2) == head_of(tmp_path / "trace.jsonl")
    assert trace.layers == (2, 10)
    assert trace.loads.shape == (3, 2, 2, 4)
    assert trace.loads[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert (trace.loads[1, 1] == np.array(ROWS)).all()


STEP = {"step": 1, "loads": {"2": ROWS}}
NO_LOADS = "trace.jsonl:2: the loads of each layer must be 2 rows of 4 token counts"
BAD: dict[str, tuple[list[object], str]] = {
    "nothing": ([], "trace.jsonl:1: not a line of an expert trace"),
    "no head": ([STEP], "trace.jsonl:1: not the header of an expert trace"),
    "no step": ([HEAD], "trace.jsonl has no step"),
    "words": (["experts"], "trace.jsonl:1: not a line of an expert trace"),
    "a list": ([[4, 2, 2]], "trace.jsonl:1: not a line of an expert trace"),
    "half a line": ([HEAD, '{"step": 1, "loa'], "trace.jsonl:2: not a line of an expert trace"),
    "no experts": ([{**HEAD, "experts": 0}, STEP], "trace.jsonl:1: not the head"),
    "ranks that divide nothing": ([{**HEAD, "ranks": 3}, STEP], "trace.jsonl:1: not the head"),
    "no loads": ([HEAD, {"step": 1}], NO_LOADS),
    "no layers": ([HEAD, {"step": 1, "loads": {}}], NO_LOADS),
    "a layer without a number": ([HEAD, {"loads": {"first": ROWS}}], NO_LOADS),
    "a rank is missing": ([HEAD, {"loads": {"2": ROWS[:1]}}], NO_LOADS),
    "an expert is missing": ([HEAD, {"loads": {"2": [row[:3] for row in ROWS]}}], NO_LOADS),
    "half a token": ([HEAD, {"loads": {"2": [[0.5] * 4] * 2}}], NO_LOADS),
    "true": ([HEAD, {"loads": {"2": [[True] * 4] * 2}}], NO_LOADS),
    "fewer than none": ([HEAD, {"loads": {"2": [[-1] * 4] * 2}}], NO_LOADS),
    "too many": ([HEAD, {"loads": {"2": [[10**13] * 4] * 2}}], NO_LOADS),
    "other layers": ([HEAD, STEP, {"loads": {"3": ROWS}}], "trace.jsonl:3: the layers differ from"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_line(name: str, tmp_path: Path) -> None:
    lines, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        read_trace(written(tmp_path, *lines))


def test_a_file_without_an_end_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{")
    os.truncate(path, 64 << 30)
    for read in (head_of, read_trace):
        with pytest.raises(OSError, match="not all are stored"):
            read(path)
