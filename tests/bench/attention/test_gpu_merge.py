"""The bench of joined blocks runs on CPU with tiny sizes."""

from __future__ import annotations

import json

import pytest
import torch

from bytescale_ext.attention.merge import join_
from scripts.bench.attention import gpu_merge


def test_it_runs_and_says_why_no_kernel_is_fused(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_merge.main(["--device", "cpu", "--json"])
    *text, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert text[0] == "no fused kernel: it runs on cuda, not on cpu"
    assert [(row["intervals"], row["way"]) for row in figures["rows"]] == [("one", "torch"), ("two", "torch")]
    assert all(row["gb_per_second"] > 0 for row in figures["rows"])


def test_both_ways_are_measured_on_the_same_rows() -> None:
    calls: list[tuple[str, int]] = []

    def way(name: str) -> gpu_merge.JoinFunction:
        def join(totals: gpu_merge.Output, part: gpu_merge.Output, rows: gpu_merge.Rows) -> None:
            assert rows.num_rows == len(part[0])
            calls.append((name, len(rows.intervals)))
            join_(totals, part, rows)

        return join

    rows = gpu_merge.measure(torch.device("cpu"), (8,), {"a": way("a"), "b": way("b")})
    assert [(row["way"], row["intervals"]) for row in rows] == [("a", "one"), ("b", "one"), ("a", "two"), ("b", "two")]
    assert set(calls) == {("a", 1), ("b", 1), ("a", 2), ("b", 2)}


def test_moved_bytes_count_totals_twice_and_the_block_once() -> None:
    """Totals of the joined rows in float32, read and written; the block in bfloat16; sums in float32."""
    device = torch.device("cpu")
    totals, part = gpu_merge.outputs(10, torch.float32, device), gpu_merge.outputs(4, torch.bfloat16, device)
    values, sums = 4 * 32 * 128, 4 * 32
    assert gpu_merge.moved_bytes(totals, part) == values * (2 + 2 * 4) + sums * (4 + 2 * 4)


def test_without_a_gpu_the_message_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit):
        gpu_merge.main([])
    assert "--device cpu" in capsys.readouterr().err
