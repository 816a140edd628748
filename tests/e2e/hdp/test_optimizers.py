"""Optimizers of emerging-optimizers under hybrid data parallelism update like one process, and resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.oracle import train_with_named_weights
from tests.e2e.pipelines import train_one_by_one
from tests.e2e.training import HDP, MODEL, TRAIN, step_losses, train_once, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

BF16 = "--bf16 --init-method-std 0.02".split()
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
).split()
# Muon orthogonalizes whole matrices, as one process does: tensor-parallel ranks share the products.
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --muon-tp-mode duplicated".split()
WHOLE = ["--muon-no-split-qkv"]
TOLERANCE = 1e-4  # Muon makes all directions of a step equally long, and so enlarges rounding errors
BF16_TOLERANCE = 1e-3  # half of a rounding step; plans differed by 2.2e-4 after two updates
CASES: dict[str, tuple[list[str], list[str], list[str]]] = {  # optimizer, flags of both runs, flags of the ranks
    "muon, experts": (["muon"], EXPERTS, ["--expert-model-parallel-size", "2"]),
    "muon, stages": (["muon"], [], ["--pipeline-model-parallel-size", "2"]),
    "muon, tensor-parallel": (["muon", *WHOLE], [], TP2),
    "muon, sharded": (["muon"], BF16, SHARDED),
    "lion": (["lion"], [], []),
    "lion, sharded": (["lion"], BF16, SHARDED[:1]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_one_process(name: str, corpus: Path) -> None:
    optimizer, model, flags = CASES[name]
    common = [*MODEL, *TRAIN, "--data-path", corpus, "--optimizer", *optimizer, *model]
    one_by_one = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
    expected = train_once(1, *common, *one_by_one, entry=train_one_by_one)
    found = train_ranks(2, *common, *HDP, "--hdp-tokens-per-rank", 256, *flags, entry=train_with_named_weights)[-1]
    assert found.losses == pytest.approx(expected.losses, rel=BF16_TOLERANCE if "--bf16" in model else TOLERANCE)


CLIP = "--qk-clip --qk-clip-threshold 0.5 --qk-clip-alpha 0.3".split()
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --seq1f1b-slices 2".split()
CLIPPED: dict[str, tuple[list[str], list[str]]] = {  # flags of both runs, flags of the ranks
    "adam, bf16": (["adam", *BF16, "--init-method-std", "0.2"], SHARDED),
    "adam, bf16, tensor-parallel": (["adam", *BF16, "--init-method-std", "0.2"], [*TP2[:4], "--num-query-groups", "1"]),
    "adam, virtual stages in slices": (["adam", "--num-layers", "4"], VIRTUAL),
    "muon": (["muon"], []),
    "muon, bf16": (["muon", *BF16, "--init-method-std", "0.2"], SHARDED),
}


@pytest.mark.parametrize("name", sampled(CLIPPED, ["adam, bf16"]))
def test_clipped_weights_are_those_of_one_rank(name: str, corpus: Path, tmp_path: Path) -> None:
    """One rank has whole float32 weights. Shards follow the clip too, or the next update would bring large logits back.

    Logits show it better than losses, which depend little on attention in so small a model.
    """
    model, flags = CLIPPED[name]
    groups = ["--num-query-groups", "1"] if "--num-query-groups" in flags else []
    common = [*MODEL, *TRAIN, *HDP, "--data-path", corpus, "--hdp-tokens-per-rank", 256, "--optimizer", *model, *groups]
    runs = {"one": (1, CLIP), "ranks": (2, [*CLIP, *flags]), "unclipped": (1, ["--log-max-attention-logit"])}
    for folder, (num_ranks, words) in runs.items():
        logged = ["--hdp-log-dir", tmp_path / folder]
        train_ranks(num_ranks, *common, *words, *logged, entry=train_with_named_weights)
    tolerance = BF16_TOLERANCE if "--bf16" in model else TOLERANCE
    losses = {folder: step_losses(tmp_path / folder) for folder in runs}
    assert losses["ranks"] == pytest.approx(losses["one"], rel=tolerance)
    logits = {folder: step_losses(tmp_path / folder, "max_attention_logit") for folder in runs}
    assert logits["ranks"] == pytest.approx(logits["one"], rel=20 * tolerance)
    assert min(logits["one"][:-1]) > 0.5  # heads were clipped after each step
    assert logits["unclipped"][0] == logits["one"][0]
    assert logits["unclipped"][-1] > 2 * logits["one"][-1]


@pytest.mark.full
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("flags", [[], [*BF16, *SHARDED, *CLIP]], ids=["whole", "sharded, clipped"])
def test_a_resumed_run_goes_on(flags: list[str], form: str, corpus: Path, tmp_path: Path) -> None:
    common = [*MODEL, *TRAIN, *HDP, "--data-path", corpus, "--optimizer", "muon", *flags, "--ckpt-format", form]
    words = [*common, "--hdp-tokens-per-rank", 256, "--hdp-learn-costs", "off", "--train-iters", 4]
    whole = train_ranks(2, *words, entry=train_with_named_weights)[-1]
    begun = train_ranks(2, *words, "--save", tmp_path, "--exit-interval", 2, entry=train_with_named_weights)[-1]
    resumed = train_ranks(2, *words, "--load", tmp_path, entry=train_with_named_weights)[-1]
    assert begun.losses == whole.losses[:2]
    assert resumed.losses[0] == whole.losses[2]  # the next log line has the mean of two steps
