"""Small model with draft heads, trained once in a test session.

Heads are trained in three settings: with the distance to the model's hidden states, with the cross entropy only, and
together with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.e2e.corpora import documents
from tests.e2e.once import once
from tests.e2e.training import HDP, MODEL, TRAIN, SavedRun, train, train_once

COMMON = [*TRAIN, "--ckpt-format", "torch_dist", "--no-save-rng", "--no-load-rng"]
ONE = [*HDP, "--hdp-tokens-per-rank", "256"]
HEADS = "--draft-heads clover --num-draft-heads 3 --draft-layers 1".split()
CLOVER = [*HEADS, "--draft-hidden-weight", "0.5"]
TOGETHER = [*CLOVER, "--draft-train-trunk"]
# name: (ranks, flags), of heads with the flags CLOVER
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tensor and sequence parallel, loss in chunks": (
        2,
        [
            *ONE,
            *"--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split(),
            *"--chunked-cross-entropy 32".split(),
        ],
    ),
    "pipeline": (2, [*ONE, "--pipeline-model-parallel-size", "2"]),
}


RINGS = [*HDP, "--hdp-tokens-per-rank", "64", "--use-distributed-optimizer"]  # of 1 to 4 ranks
SLICES = [
    *ONE,
    *"--pipeline-model-parallel-size 2 --seq1f1b-slices 3 --activation-policy memo --host-memory-gb 0.1".split(),
    *"--swap-fraction 0.5 --chunked-cross-entropy 16".split(),
]


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
).split()
"""All layers have experts, whose biases a trained model changes in each step."""
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --rope-type rope"
).split()
"""Queries and keys are made from latents."""
WINDOWS = "--window-size 20,0 --softmax-type learnable".split()
EXPERT_RINGS = [
    *HDP,
    *"--hdp-tokens-per-rank 128 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split(),
]


def with_flags(model: Sequence[str]) -> list[str]:
    """Return the flags of ``MODEL`` with more flags; latent attention has no groups of queries."""
    groups = MODEL.index("--group-query-attention")
    return [*(MODEL[:groups] + MODEL[groups + 3 :] if model is LATENT else MODEL), *model]


def trunk(model: Sequence[str] = ()) -> Path:
    """Return the folder of a model after one training step; ``model``: its flags in addition to ``MODEL``."""

    def make(folder: Path) -> Path:
        train(1, *with_flags(model), *COMMON, "--data-path", documents(), *ONE, "--train-iters", 1, "--save", folder)
        return folder

    return once(make, f"trunk of draft heads {' '.join(model)}".strip())


def heads_of(ranks: int, *flags: object, heads: Sequence[str] = CLOVER, model: Sequence[str] = ()) -> SavedRun:
    """Return a run of two steps on the trunk, with a checkpoint of the last step or, on one rank, of both steps."""
    steps = ["--train-iters", 2, "--save-interval", 1 if ranks == 1 else 2, "--pretrained-checkpoint", trunk(model)]
    return train_once(ranks, *with_flags(model), *COMMON, "--data-path", documents(), *heads, *steps, *flags)
