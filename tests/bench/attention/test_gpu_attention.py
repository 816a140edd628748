"""The bench of attention runs on CPU with tiny sizes, and its checks find errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bytescale_ext.attention.kernels.contract import Output
from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from scripts.bench.attention import gpu_attention as bench

SCRIPT = Path(bench.__file__)


@pytest.mark.full
@pytest.mark.ranks
def test_command_on_cpu() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--json"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert output.returncode == 0, output.stderr
    *text, last = output.stdout.splitlines()
    assert "CPU (tiny sizes" in text[0]
    assert any("not torch_flash" in line for line in text)
    results = json.loads(last)
    assert results["kernel"] == "cpu_flash"
    measured = {(row["direction"], row["num_tokens"], row["width"]) for row in results["rows"]}
    assert measured == {(direction, 192, w) for direction in ("forward", "forward+backward") for w in (0, 1, 2, 4, 8)}
    assert all(0 < row["kernel_ms"] <= row["total_ms"] for row in results["rows"])
    assert set(results["relative_errors"]) == {"1", "2", "4", "8"}
    assert all(error < 1e-5 for errors in results["relative_errors"].values() for error in errors.values())


def test_without_a_gpu_the_message_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit):
        bench.parse([])
    assert "--device cpu --quick runs tiny sizes" in capsys.readouterr().err


@pytest.mark.parametrize("num_tokens", [1, 192, 8192, 1000])
def test_packs_are_full(num_tokens: int) -> None:
    lengths = bench.pack_lengths(num_tokens)
    assert sum(lengths) == num_tokens
    assert min(lengths) >= 1
    assert max(lengths) <= max(1, num_tokens // 8)


def test_work_counts_the_causal_triangle_once() -> None:
    _, settings = bench.parse(["--device", "cpu", "--quick"])
    # Two tokens see three keys: QK and PV are two products of 2 * heads * head_dim each.
    assert settings.tera_flops([2], backward=False) == pytest.approx(3 * 4 * 4 * 64 / 1e12)
    assert settings.tera_flops([2, 2], backward=True) == pytest.approx(2 * 3.5 * 3 * 4 * 4 * 64 / 1e12)


def test_a_wrong_kernel_shows_in_the_errors() -> None:
    _, settings = bench.parse(["--device", "cpu", "--quick"])
    kernel = choose_kernel("cpu", torch.float32, settings.head_dim).kernel

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        out, lse = kernel.forward(q, k, v, block)
        return out, lse + 0.5 * block.causal

    errors = bench.errors(settings, dataclasses.replace(kernel, forward=wrong))
    assert errors[2]["out"] > 1e-2
