"""The bench of n-gram rows runs on CPU, and a cache reads the same rows as a gather."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from bytescale_ext.states.rows import RowTable
from scripts.bench.states import gpu_ngram


def test_rows_of_steps() -> None:
    steps = gpu_ngram.drawn_steps(1000, 50, 3, seed=0)
    assert len(steps) == 3
    for rows, places in steps:
        assert (np.diff(rows) > 0).all()
        assert rows[-1] < 1000
        assert len(places) == 50 * gpu_ngram.COLUMNS


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cache_reads_and_updates_the_same_rows_as_a_gather(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, device = gpu_ngram.drawn_steps(200, 20, 6, seed=0), torch.device("cpu")
    tables = [RowTable.random(range(200), 4, 1.0, 0) for _ in range(2)]
    read: list[torch.Tensor] = []

    def keep(values: np.ndarray, places: np.ndarray, device: torch.device) -> torch.Tensor:
        read.append(torch.from_numpy(values[places].copy()))
        return read[-1]

    monkeypatch.setattr(gpu_ngram, "to_device", keep)
    assert len(gpu_ngram.read_on_host(tables[0], steps, device)) == 6
    assert len(gpu_ngram.read_cached(tables[1], steps, device, ahead)) == 6
    assert all(torch.equal(one, other) for one, other in zip(read[:6], read[6:], strict=True))
    assert (tables[0].values == tables[1].values).all()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "gpu_ngram.py --device cpu --rows 2K --dim 4 --tokens 16 --steps 2 --json".split()
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_ngram.main() == 0
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert list(figures["seconds"]) == ["device", "host", "cached", "ahead"]
    assert figures["start"]["forecast_bytes"] == 2048 * (16 + 12 + 4) + 204 * (32 + 48)
    assert lines[0].startswith("start ")
