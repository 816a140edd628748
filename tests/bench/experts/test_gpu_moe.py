"""The bench of experts in slots runs on CPU with tiny sizes."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.bench.experts import gpu_moe


def test_it_runs_and_balances_a_busy_rank(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_moe.main(["--device", "cpu", "--json"])
    *text, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert [line.split()[0] for line in text] == ["balanced", "busy"]
    assert figures["device"] == "cpu"
    assert min(figures["balanced"]["homes_ms"], figures["balanced"]["slots_ms"]) > 0
    assert figures["balanced"]["overhead"] > -1
    mean = figures["tokens"] * gpu_moe.TOPK
    assert figures["busy"]["static_tokens"] > 1.5 * mean
    assert mean * 0.9 < figures["busy"]["flexmoe_tokens"] < 1.3 * mean


def test_a_grouped_product_is_one_product_for_each_slot() -> None:
    tokens, weights = torch.randn(7, 3), torch.randn(4, 3, 5)
    product = gpu_moe.grouped_product(tokens, weights, torch.tensor([2, 2, 6, 7]))
    expected = [tokens[:2] @ weights[0], tokens[2:6] @ weights[2], tokens[6:] @ weights[3]]
    assert torch.allclose(product, torch.cat(expected))


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu_moe.main([])
    assert "there is no GPU; --device cpu --quick runs tiny sizes" in capsys.readouterr().err
