"""Multi-token prediction under hybrid data parallelism: what it reads, and what it is refused with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.config.multi_token import MultiTokenConfig
from megatron.bytescale.features.multi_token import MULTI_TOKEN
from tests.bytescale.arguments.resolving import resolve_lines
from tests.data.sources import write_data_set
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

# flags after the common ones, ranks, the setting that the error names
REFUSED = {
    "experts again": ("--num-experts 4 --mtp-use-repeated-layer", 1, "--mtp-use-repeated-layer with --num-experts"),
    "upcycling": ("--num-experts 4 --moe-use-upcycling", 1, "--moe-use-upcycling"),
    "norms of torch": ("--sequence-parallel --tensor-model-parallel-size 2", 2, "--sequence-parallel of local layers"),
    "layout": ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tmL", 2, "layout"),
    "positions": (
        "--position-embedding-type learned_absolute --pipeline-model-parallel-size 2", 2, "learned_absolute in pipeline"
    ),
    "one layer": ("--mtp-use-repeated-layer --seq1f1b-slices 2 --pipeline-model-parallel-size 2", 2, "in slices"),
    "ray": ("--hdp-loader ray", 1, "--hdp-loader ray"),
    "windows": ("--sculpt-windows a.windows.npy", 1, "--sculpt-windows"),
    "zero bubble": ("--seq1f1b-zero-bubble --pipeline-model-parallel-size 2 --seq1f1b-slices 2", 2, "--seq1f1b-zero"),
    "pages": ("--state-policy paged", 1, "--state-policy"),
    "n-grams": ("--ngram-layers 1", 1, "--ngram-layers"),
    "policies": ("--activation-policy memo --host-memory-gb 1", 1, "--mtp-num-layers: remove it: policies do not"),
}  # fmt: skip


def test_what_is_refused_and_what_runs(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a", [[[1, 2, 3]]])
    common = [*MODEL, *TRAIN, "--data-path", str(tmp_path / "a"), "--mtp-num-layers", "2"]
    with_hdp = [*common, *HDP, "--hdp-tokens-per-rank", "256"]
    lines = [(ranks, [*with_hdp, *words.split()]) for words, ranks, _ in REFUSED.values()]
    good = (2, [*with_hdp, *"--pipeline-model-parallel-size 2 --seq1f1b-slices 2 --chunked-cross-entropy 8".split()])
    chunks = (1, [*common, "--micro-batch-size", "1", "--chunked-cross-entropy", "8"])
    stages = (2, [*common, "--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"])
    *found, runs, alone, in_stages = resolve_lines(*lines, good, chunks, stages)
    for name, one in zip(REFUSED, found, strict=True):
        assert one.error is not None, name
        assert "does not work with" in one.error, name
        assert REFUSED[name][2] in one.error, (name, one.error)
    assert runs.error is None
    assert runs.features[MULTI_TOKEN.name] == MultiTokenConfig(2, 0.05)
    assert alone.error == (
        "--chunked-cross-entropy does not work with --mtp-num-layers without --hybrid-data-parallel: "
        "add --hybrid-data-parallel, which computes its losses in chunks too"
    )
    assert "in pipelines: add --hybrid-data-parallel" in (in_stages.error or "")
