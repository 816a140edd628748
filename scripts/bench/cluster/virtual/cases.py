"""Cases and arms of ``speed.py --device-times``: lengths, cluster and links of a modelled model.

Lengths are recorded 1:32: a recorded token stands for 32 tokens of the modelled model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.model_shape import LLAMA_7B, ModelShape, key_value_bytes
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.schedule.document_slices import affordable_tokens
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from megatron.bytescale.features.slices.flags import flags_of

SCALE: Final = 32
CONTEXT: Final = 262144
TOKENS_PER_RANK: Final = 16384
SHORTEST: Final = 512
"""Shortest modelled document; shorter ones are joined."""
TOKENS_OF_RANK: Final = 131072
"""Modelled tokens of a step for each rank, about."""


@dataclass(frozen=True)
class Case:
    """Documents, and a cluster that trains a modelled model.

    Attributes:
        sampler: distribution of lengths.
        num_nodes, ranks_per_node: shape of the cluster.
        context: most modelled tokens of a document.
        tokens_per_rank: C, modelled tokens.
        shape: modelled model.
    """

    sampler: str
    num_nodes: int = 2
    ranks_per_node: int = 8
    context: int = CONTEXT
    tokens_per_rank: int = TOKENS_PER_RANK
    shape: ModelShape = field(default=LLAMA_7B)

    def __str__(self) -> str:
        return f"{self.sampler} {self.context // 1024}K, {self.num_ranks} GPUs"

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def lengths(self, num_steps: int, seed: int) -> list[int]:
        """Return the recorded tokens of all documents of some steps, with equal numbers of documents in each step."""
        tokens = num_steps * TOKENS_OF_RANK * self.num_ranks
        lengths = sample_lengths(self.sampler, self.context, tokens, seed)
        long = lengths[lengths >= SHORTEST].astype(np.int64) // SCALE
        num_short = int(lengths[lengths < SHORTEST].sum()) // SHORTEST
        drawn = np.concatenate((long, np.full(num_short, SHORTEST // SCALE)))
        np.random.default_rng(seed).shuffle(drawn)
        multiple = num_steps * self.num_ranks
        documents: list[int] = drawn[: len(drawn) // multiple * multiple].tolist()
        return documents


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        title: name in tables.
        flags: flags of the training.
        width: static width of every document; 0: the plan decides; -1: all ranks.
        megatrons: plans of Megatron that run in place of ours: "hybrid", with its barriers, or "dynamic".
        num_stages: stages of its pipelines.
        slicing: slices of micro-batches.
    """

    title: str
    flags: tuple[str, ...] = ()
    width: int = 0
    megatrons: str = ""
    num_stages: int = 1
    slicing: Slicing = ONE_SLICE

    @property
    def follows_costs(self) -> bool:
        """Whether its plans follow the costs, as fixed widths, Algorithm 1 and Megatron's plans do not."""
        return not self.width and self.megatrons not in (HYBRID, DYNAMIC) and "none" not in self.flags

    def words(self, case: Case) -> list[str]:
        """Return the flags of a case."""
        words = ["--hdp-tokens-per-rank", str(self.tokens_per_rank(case) // SCALE), *self.flags]
        width = case.num_ranks if self.width == -1 else self.width
        words += ["--hdp-static-width", str(width)] if width else []
        if self.num_stages == 1:
            return words
        words += ["--pipeline-model-parallel-size", str(self.num_stages)]
        if self.slicing.num_slices == 1:
            return words
        return [*words, *flags_of(self.slicing), "--hdp-kept-keys", str(self.kept_tokens(case) // SCALE)]

    def kept_tokens(self, case: Case) -> int:
        """Return the modelled tokens of the longest document whose keys a rank keeps, as training sets it."""
        layer_bytes, key_bytes = 34.0 * case.shape.hidden, key_value_bytes(case.shape)
        return affordable_tokens(self.num_stages, self.slicing, self.tokens_per_rank(case), layer_bytes, key_bytes)

    def tokens_per_rank(self, case: Case) -> int:
        """Return C, modelled tokens. A stage has fewer layers, and so more tokens."""
        return case.tokens_per_rank * self.num_stages


@dataclass(frozen=True)
class Planned:
    """A case and the arms that run in it, ours first."""

    case: Case
    arms: tuple[str, ...]


HYBRID: Final = "hybrid"
DYNAMIC: Final = "dynamic"
ARMS: Final = {
    "ours": Arm("hybrid data parallelism", ("--hdp-hierarchical-rings", "auto")),
    "bytescale": Arm("Algorithm 2 as published", ("--hdp-balance", "bytescale", "--hdp-hierarchical-rings", "off")),
    "naive": Arm("naive HDP (Algorithm 1)", ("--hdp-balance", "none", "--hdp-hierarchical-rings", "off")),
    "static": Arm("static context parallelism over all ranks", ("--hdp-hierarchical-rings", "off"), -1),
    "hybrid": Arm("Megatron's hybrid plan, its barriers", ("--hdp-hierarchical-rings", "off"), megatrons=HYBRID),
    DYNAMIC: Arm("Megatron's dynamic plan", ("--hdp-hierarchical-rings", "off"), megatrons=DYNAMIC),
    "packed": Arm("plain data parallelism with packing", ("--hdp-hierarchical-rings", "off"), 1),
    "stages": Arm("4 stages, 1F1B", num_stages=4),
    "slices": Arm("4 stages, 4 slices (Seq1F1B)", num_stages=4, slicing=Slicing(4)),
    "eager": Arm("4 stages, 4 eager slices", num_stages=4, slicing=Slicing(4).in_eager_order()),
}

_MAIN: Final = ("ours", "bytescale", "naive", "static", "hybrid", DYNAMIC)
QUICK: Final = (
    Planned(Case("byted"), (*_MAIN, "stages", "slices", "eager")),
    Planned(Case("github"), _MAIN),
    Planned(Case("wikipedia"), _MAIN),
    Planned(Case("byted", context=TOKENS_PER_RANK), ("ours", "packed")),
)
"""The cases of ``--quick``."""

FULL: Final = (
    *QUICK,
    *(
        Planned(Case(sampler, num_nodes=nodes), _MAIN)
        for nodes in (4, 8)
        for sampler in ("byted", "github", "wikipedia")
    ),
)
"""All cases: also 32 and 64 ranks."""
