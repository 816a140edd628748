"""A run records the expert loads of its tokens on all ranks and stages, and counts each token once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_ext.plan.experts.trace import TraceHead, read_trace
from tests.e2e.training import HDP, MODEL, TRAIN, record_steps, train

pytestmark = pytest.mark.ranks

MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall".split()
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


@pytest.mark.full
def test_samples_on_ranks_that_share_experts(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    words = [*MODEL, *TRAIN, *MOE, *RECOMPUTED, "--data-path", corpus, "--micro-batch-size", 2,
             "--expert-model-parallel-size", 2, "--train-iters", 2, "--moe-placement-trace", file]  # fmt: skip
    train(2, *words)
    trace = read_trace(file)
    assert trace.head == TraceHead(experts=4, topk=2, ranks=2)
    assert trace.layers == (1, 2)
    assert trace.loads.shape == (2, 2, 2, 4)
    assert (trace.loads.sum(3) == 4 * 256 * 2).all(), "4 samples of each rank, 2 experts for each token"
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()[1:]] == [1, 2]


def test_documents_in_a_pipeline(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "loads.jsonl"
    words = [*MODEL, *TRAIN, *HDP, *MOE, "--data-path", corpus, "--hdp-tokens-per-rank", 512, "--train-iters", 2,
             "--pipeline-model-parallel-size", 2, "--mtp-num-layers", 1, "--moe-placement-trace", file]  # fmt: skip
    records = train(2, *words, entry=record_steps).records()
    trace = read_trace(file)
    assert trace.head.ranks == 1
    assert trace.layers == (1, 2, 3), "layers of multi-token prediction follow the model's layers"
    rows = [record["num_rows"] for record in records]
    assert trace.loads.sum((2, 3)).tolist() == [[2 * row] * 3 for row in rows]
