"""The comparison of windows with full attention runs and counts pairs."""

from __future__ import annotations

import json

import pytest

from scripts.bench.attention.windows import main, pairs


@pytest.mark.parametrize(("num_tokens", "window"), [(10, 3), (10, 9), (10, 50), (1, 1)])
def test_pairs_are_those_of_the_band(num_tokens: int, window: int) -> None:
    band = [(q, k) for q in range(num_tokens) for k in range(q + 1)]
    assert pairs(num_tokens, None) == len(band)
    assert pairs(num_tokens, window) == sum(q - k <= window for q, k in band)


def test_a_small_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    main("--tokens 96 --windows 16 --widths 1 2 --repeats 1 --device cpu --json".split())
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["ranks"], row["window"]) for row in rows] == [(1, 16), (2, 16)]
    assert all(row["full_ms"] > 0 and row["window_ms"] > 0 for row in rows)
    assert rows[0]["work_ratio"] == pytest.approx(pairs(96, None) / pairs(96, 16))
