"""The training flags that ``bytescale search`` decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bytescale_ext.plan.search.space import LOSS_TOKENS, MOST_CHUNKS
from bytescale_ext.plan.search.strategy import BLOCK, FULL, PRICED, Strategy

EQUAL: Final = "equal stages"
UNEQUAL: Final = "unequal stages"

CHOICES: Final[Mapping[str, Callable[[Strategy], str]]] = {
    "--tensor-model-parallel-size": lambda strategy: str(strategy.tensor_parallel),
    "--pipeline-model-parallel-size": lambda strategy: str(strategy.num_stages),
    "--pipeline-model-parallel-layout": lambda strategy: UNEQUAL if len(set(strategy.stage_layers)) > 1 else EQUAL,
    "--expert-model-parallel-size": lambda strategy: str(strategy.expert_parallel),
    "--num-virtual-stages-per-pipeline-rank": lambda strategy: str(strategy.chunks),
    "--hdp-tokens-per-rank": lambda strategy: str(strategy.tokens_per_rank),
    "--use-distributed-optimizer": lambda strategy: "on" if strategy.shares_optimizer else "off",
    "--seq1f1b-slices": lambda strategy: "auto" if strategy.chooses_slices else "1",
    "--activation-policy": lambda strategy: PRICED if strategy.activations == PRICED else "none",
    "--recompute-granularity": lambda strategy: FULL if strategy.activations in (FULL, BLOCK) else "none",
    "--recompute-method": lambda strategy: {FULL: "uniform", BLOCK: BLOCK}.get(strategy.activations, "none"),
    "--chunked-cross-entropy": lambda strategy: "off" if strategy.loss_tokens is None else str(strategy.loss_tokens),
}
"""Flags that ``--explain`` accepts, each with a function that returns its value in a strategy."""

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
"""Values of the flags that differ within a branch of strategies."""

BATCH: Final = "--global-batch-size"
"""A flag of the steps, not of a strategy; the search varies it if it is not given."""

DECIDED: Final = frozenset(CHOICES) | {
    "--hybrid-data-parallel", "--sequence-parallel", "--context-parallel-size", "--seq-length", BATCH,
    "--overlap-grad-reduce", "--overlap-param-gather", "--recompute-num-layers",
    "--device-memory-gb", "--host-memory-gb", "--cost-file", "--hdp-kept-keys", "--hdp-swapped-keys",
    "--swap-fraction", "--recompute-fraction", "--recompute-activations", "--num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--moe-token-dispatcher-type",
    "--expert-tensor-parallel-size",
}  # fmt: skip
"""Training flags that the search decides, or that are options of the search."""
