"""The command lines of the survey."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.training import CLASSIC_MODEL, HDP, MODEL, TRAIN


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes:
        words: its words.
        num_processes: processes of the run.
        has_model: whether to build the model; otherwise only ``run`` and ``config`` are read.
    """

    words: tuple[str, ...]
    num_processes: int = 1
    has_model: bool = True


def _without(words: list[str], *left_out: str) -> list[str]:
    text = " ".join(words)
    for part in left_out:
        assert part in text
        text = text.replace(part, "")
    return text.split()


_DATA = "--data-path unread --cpu".split()
_HDP = [*TRAIN, *HDP, "--hdp-tokens-per-rank", "256", *_DATA]
_PIPELINE = [*TRAIN, *HDP, *_DATA, *"--pipeline-model-parallel-size 2 --num-layers 4".split()]
_MULTI_HEAD = _without(MODEL, "--group-query-attention", "--num-query-groups 2")
_LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 12 --rope-type"
).split()
_EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall".split()
_LINES: dict[str, Line | list[str]] = {
    "rope": [*MODEL, *_HDP],
    "classic": [*CLASSIC_MODEL, *_HDP],
    "scaled": [*MODEL, *_HDP, "--use-rope-scaling"],
    "yarn": [*MODEL, *_HDP, *"--position-embedding-type yarn --rotary-scaling-factor 8".split()],
    "latent": [*_MULTI_HEAD, *_HDP, *_LATENT, "rope"],
    "latent yarn": [*_MULTI_HEAD, *_HDP, *_LATENT, *"yarn --rotary-scaling-factor 8".split()],
    "experts": [*MODEL, *_HDP, *_EXPERTS],
    "stock": Line((*MODEL, *TRAIN, *_DATA, "--micro-batch-size", "1"), has_model=False),
    "samples": Line(
        (*_without([*MODEL, *_HDP], "--train-iters 3", "--lr-decay-iters 10"), *"--train-samples 24".split())
    ),
    "ranks": Line((*MODEL, *TRAIN, *HDP, *_DATA), 4, has_model=False),
    "pipeline": Line((*MODEL, *_PIPELINE), 8, has_model=False),
    "expert ranks": Line(
        (*MODEL, *TRAIN, *HDP, *_DATA, *_EXPERTS, *"--expert-model-parallel-size 2".split()), 4, has_model=False
    ),
}
LINES = {name: line if isinstance(line, Line) else Line(tuple(line)) for name, line in _LINES.items()}
"""Command lines by name."""
