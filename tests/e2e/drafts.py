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


def trunk() -> Path:
    """Return the folder of a model after one training step."""

    def make(folder: Path) -> Path:
        train(1, *MODEL, *COMMON, "--data-path", documents(), *ONE, "--train-iters", 1, "--save", folder)
        return folder

    return once(make, "trunk of draft heads")


def heads_of(ranks: int, *flags: object, heads: Sequence[str] = CLOVER) -> SavedRun:
    """Return a run of two steps on the trunk, with a checkpoint of the last step or, on one rank, of both steps."""
    steps = ["--train-iters", 2, "--save-interval", 1 if ranks == 1 else 2, "--pretrained-checkpoint", trunk()]
    return train_once(ranks, *MODEL, *COMMON, "--data-path", documents(), *heads, *steps, *flags)
