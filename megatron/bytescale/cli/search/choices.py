"""The flags that ``bytescale search`` decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bytescale_ext.plan.search.space import LOSS_TOKENS, MOST_CHUNKS
from bytescale_ext.plan.search.strategy import BLOCK, FULL, PRICED, Strategy

EQUAL: Final = "equal stages"
UNEQUAL: Final = "unequal stages"

CHOICES: Final[Mapping[str, Callable[[Strategy], str]]] = {
    "--tensor-model-parallel-size": lambda one: str(one.tensor_parallel),
    "--pipeline-model-parallel-size": lambda one: str(one.num_stages),
    "--pipeline-model-parallel-layout": lambda one: UNEQUAL if len(set(one.stage_layers)) > 1 else EQUAL,
    "--expert-model-parallel-size": lambda one: str(one.expert_parallel),
    "--num-virtual-stages-per-pipeline-rank": lambda one: str(one.chunks),
    "--hdp-tokens-per-rank": lambda one: str(one.tokens_per_rank),
    "--use-distributed-optimizer": lambda one: "on" if one.shares_optimizer else "off",
    "--seq1f1b-slices": lambda one: "auto" if one.chooses_slices else "1",
    "--activation-policy": lambda one: PRICED if one.activations == PRICED else "none",
    "--recompute-granularity": lambda one: FULL if one.activations in (FULL, BLOCK) else "none",
    "--recompute-method": lambda one: {FULL: "uniform", BLOCK: BLOCK}.get(one.activations, "none"),
    "--chunked-cross-entropy": lambda one: "off" if one.loss_tokens is None else str(one.loss_tokens),
}
"""Flags that ``--explain`` takes, each with its value in a strategy."""

VALUES: Final[Mapping[str, Sequence[str]]] = {
    "--pipeline-model-parallel-layout": (EQUAL, UNEQUAL),
    "--num-virtual-stages-per-pipeline-rank": tuple(map(str, range(1, MOST_CHUNKS + 1))),
    "--use-distributed-optimizer": ("on", "off"),
    "--seq1f1b-slices": ("1", "auto"),
    "--activation-policy": ("none", PRICED),
    "--recompute-granularity": ("none", FULL),
    "--recompute-method": ("none", BLOCK, "uniform"),
    "--chunked-cross-entropy": ("off", str(LOSS_TOKENS)),
}
"""Values of the flags that strategies of one branch do not have in common."""

BATCH: Final = "--global-batch-size"
"""A flag that is of a step, not of a strategy; the search varies it where it is left open."""

DECIDED: Final = frozenset(CHOICES) | {
    "--hybrid-data-parallel", "--sequence-parallel", "--context-parallel-size", "--seq-length", BATCH,
    "--overlap-grad-reduce", "--overlap-param-gather", "--recompute-num-layers",
    "--device-memory-gb", "--host-memory-gb", "--cost-file", "--hdp-kept-keys", "--hdp-swapped-keys",
    "--swap-fraction", "--recompute-fraction", "--recompute-activations", "--num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--moe-token-dispatcher-type",
    "--expert-tensor-parallel-size",
}  # fmt: skip
"""Flags of the training that the search decides or takes by an option of its own."""
