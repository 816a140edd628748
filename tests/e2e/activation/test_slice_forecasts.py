"""The activations of pipeline stages in slices take the bytes that a dry run predicts, under each activation policy.

``--hdp-memory-step`` counts live tensor storages on CPU. Each step has full micro-batches, as forecasts assume.
"""

from __future__ import annotations

import pytest

from tests.e2e.activation.test_forecasts import POLICIES, Measured, train_and_measure
from tests.e2e.corpora import documents
from tests.e2e.devices import not_on_ghosts
from tests.e2e.training import HDP, MODEL, TRAIN, train_ranks

pytestmark = [pytest.mark.ranks, not_on_ghosts("it measures tensors of the CPU")]

TOKENS = 512
STEPS = 2
STAGES = 2
SIZES = (
    f"--num-layers 8 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 8 --init-method-std 0.02 "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --global-batch-size 6 --train-iters {STEPS} "
    f"--hdp-tokens-per-rank {TOKENS} --hdp-memory-step {STEPS} --hdp-learn-costs off --chunked-cross-entropy 64 "
    f"--pipeline-model-parallel-size {STAGES}"
).split()
SLICES = {
    "whole": "",
    "2 slices": "--seq1f1b-slices 2",
    "4 slices": "--seq1f1b-slices 4",
    "eager": "--seq1f1b-slices 4 --seq1f1b-eager",
}
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
VIRTUAL_STAGES = {
    "virtual stages": VIRTUAL,
    "virtual stages, first layers": f"{VIRTUAL} --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
}
CASES = [(slices, policy) for slices in SLICES for policy in POLICIES]
CASES += [(stages, "none") for stages in VIRTUAL_STAGES]


@pytest.mark.full
@pytest.mark.parametrize(("slices", "policy"), CASES)
def test_a_stage_takes_the_memory_that_a_dry_run_predicts(slices: str, policy: str) -> None:
    corpus = documents((TOKENS,), copies=18)
    words = [*MODEL, *TRAIN, *HDP, *SIZES, *(SLICES | VIRTUAL_STAGES)[slices].split(), *POLICIES[policy].split()]
    outcomes = train_ranks(STAGES, *words, "--data-path", corpus, entry=train_and_measure)
    for stage, outcome in enumerate(outcomes):
        Measured.of(outcome).check(f"{slices}, {policy}, stage {stage}")
