"""Training in FP8 on a GPU with TransformerEngine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.e2e.corpora import write_documents
from tests.e2e.gpu import train_on_gpu
from tests.e2e.training import HDP, MODEL, TRAIN


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs TransformerEngine")
@pytest.mark.parametrize("slices", [[], ["--seq1f1b-slices", "3"]], ids=["whole", "slices"])
def test_losses_in_fp8_are_near_those_in_bf16(slices: list[str], tmp_path: Path) -> None:
    """Three steps run on one GPU with documents of 1 to 256 tokens, so that nearly every micro-batch needs padding."""
    write_documents(tmp_path / "corpus")
    wide = "--hidden-size 256 --ffn-hidden-size 512 --bf16 --make-vocab-size-divisible-by 128".split()
    words = [*MODEL, *TRAIN, *HDP, "--data-path", str(tmp_path / "corpus"), *wide]
    words += ["--hdp-tokens-per-rank", "256", *slices]
    in_bf16 = train_on_gpu(words)
    in_fp8 = train_on_gpu([*words, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"])
    assert "FP8 (tensorwise): micro-batches are padded to multiples of 16 rows" in in_fp8
    losses = [[float(value) for value in re.findall(r"lm loss: ([-\d.E+]+)", text)] for text in (in_bf16, in_fp8)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]
    assert all(float(share) > 0 for share in re.findall(r"padding ([\d.]+)%", in_fp8))
