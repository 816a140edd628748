"""Multi-token prediction under hybrid data parallelism: its settings, and refused combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.config.multi_token import MultiTokenConfig
from megatron.bytescale.features.multi_token import MULTI_TOKEN
from tests.bytescale.arguments.resolving import check_refused, resolve_lines
from tests.data.sources import write_data_set
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

# flags after the common flags, ranks, the setting that the error names
REFUSED = (
    ("--num-experts 4 --moe-use-upcycling", 1, "--moe-use-upcycling"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettmm|L", 2, "layout with m before L"),
)  # fmt: skip


def test_what_is_refused_and_what_runs(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a", [[[1, 2, 3]]])
    common = [*MODEL, *TRAIN, "--data-path", str(tmp_path / "a"), "--mtp-num-layers", "2"]
    with_hdp = [*common, *HDP, "--hdp-tokens-per-rank", "256"]
    chunks = [*common, "--micro-batch-size", "1", "--chunked-cross-entropy", "8"]
    stages = [*common, "--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"]
    check_refused(
        *((ranks, [*with_hdp, *words.split()], f"does not work with|{named}") for words, ranks, named in REFUSED),
        (1, chunks, "--chunked-cross-entropy does not work with --mtp-num-layers without --hybrid-data-parallel: add"),
        (2, stages, "in pipelines: add --hybrid-data-parallel"),
    )
    good = "--pipeline-model-parallel-size 2 --seq1f1b-slices 2 --chunked-cross-entropy 8".split()
    laid_out = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tmmL".split()
    for runs in resolve_lines((2, [*with_hdp, *good]), (2, [*with_hdp, *laid_out])):
        assert runs.error is None
        assert runs.features[MULTI_TOKEN.name] == MultiTokenConfig(2, 0.05)
