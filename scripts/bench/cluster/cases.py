"""Arms (ways to train the same documents) and cases (lengths, clusters, links) of ``speed.py``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS, sample_lengths
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.features.slices.flags import flags_of
from scripts.cluster.topology import Topology

SCALE = 32
CONTEXT, SHORTEST = 16384, 128
TOKENS_PER_RANK = 2048
STEP_TOKENS = 49152  # mean of a step
CORES_SHARE = 0.88  # share of this machine's cores for all ranks together
LINKS = {"unlimited": 0.0, "fast": 4.0, "matched": 1.0, "slow": 0.25}
"""Speed of links over the speed of matched links, by name; 0: unlimited."""


@dataclass(frozen=True)
class Case:
    """Documents, a cluster and its links.

    Attributes:
        sampler: distribution of lengths.
        num_nodes, ranks_per_node: shape of the cluster.
        link: name of ``LINKS``, or Gbit/s inside and between nodes such as ``4/0.4``.
        context: most tokens of a document, after scaling.
    """

    sampler: str
    num_nodes: int
    ranks_per_node: int
    link: str = "matched"
    context: int = CONTEXT

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse ``byted 2x4 matched`` or ``byted 2x4 matched 2048``. Raises ValueError for another form."""
        words = text.split()
        if len(words) not in (3, 4) or words[0] not in SAMPLERS:
            raise ValueError(f"--cases {text!r}: give lengths, nodes x ranks and links, as in 'byted 2x4 matched'")
        shape = words[1].split("x")
        if len(shape) != 2 or not all(part.isdigit() for part in shape):
            raise ValueError(f"--cases {text!r}: {words[1]} is not of the form 2x4 (nodes x ranks of each)")
        if not words[3:] or words[3].isdigit():
            case = cls(words[0], int(shape[0]), int(shape[1]), words[2], *map(int, words[3:]))
            case.topology((1.0, 1.0))
            return case
        raise ValueError(f"--cases {text!r}: {words[3]} is not a number of tokens")

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        context = "" if self.context == CONTEXT else f" {self.context}"
        return f"{self.sampler} {self.num_nodes}x{self.ranks_per_node} {self.link}{context}"

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def gbps(self, matched: tuple[float, float]) -> tuple[float, float]:
        """Return Gbit/s inside and between nodes; ``matched`` has both of matched links. Raises ValueError."""
        if self.link in LINKS:
            return matched[0] * LINKS[self.link], matched[1] * LINKS[self.link]
        try:
            inside, _, between = self.link.partition("/")
            return float(inside), float(between or inside)
        except ValueError:
            raise ValueError(f"links {self.link!r}: give one of {', '.join(LINKS)}, or Gbit/s as in 4/0.4") from None

    def topology(self, matched: tuple[float, float]) -> Topology:
        """Return the cluster with ``matched`` Gbit/s of matched links. Raises ValueError for a bad link."""
        intra, inter = self.gbps(matched)
        cores = min(1.0, CORES_SHARE * (os.cpu_count() or 1) / max(1, self.num_ranks))
        return Topology(self.num_nodes, self.ranks_per_node, inter, intra, cores_per_rank=cores)

    def lengths(self, num_steps: int, seed: int) -> list[int]:
        """Return the tokens of all documents of some steps, with the same number of documents in each step.

        Documents below ``SHORTEST`` are joined to documents of that length, so short and long documents keep their
        shares of the tokens.
        """
        lengths = sample_lengths(self.sampler, self.context * SCALE, num_steps * STEP_TOKENS * SCALE, seed) / SCALE
        long = lengths[lengths >= SHORTEST].astype(np.int64)
        num_short = int(lengths[lengths < SHORTEST].sum()) // SHORTEST
        multiple = num_steps * self.num_ranks
        count = (len(long) + num_short) // multiple * multiple
        tokens: list[int] = [*long.tolist(), *[SHORTEST] * num_short]
        return tokens[:count]


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        title: name in tables.
        flags: flags of the training.
        script: training program.
        balance: planner of ``HdpPlanner``; None if the time of a step is not predicted with it.
        static_width: width of static context parallelism, ``{num_ranks}`` for all ranks; empty: the plan decides.
        ring_forms: ``--hdp-hierarchical-rings``; the arms of other work run plain rings, as published.
        num_stages: stages of its pipelines. A stage has 1 / num_stages of the layers and num_stages times the tokens.
    """

    title: str
    flags: tuple[str, ...] = ()
    script: str = "pretrain_gpt_hdp.py"
    balance: str | None = None
    static_width: str = ""
    ring_forms: str = "off"
    num_stages: int = 1

    @property
    def tokens_per_rank(self) -> int:
        """C, the largest micro-batch of one rank."""
        return TOKENS_PER_RANK * self.num_stages

    def words(self, case: Case) -> list[str]:
        """Return the flags of a case."""
        static = ["--hdp-static-width", self.width(case)] if self.static_width else []
        stages = ["--pipeline-model-parallel-size", self.num_stages] if self.num_stages > 1 else []
        forms = ["--hdp-hierarchical-rings", self.ring_forms]
        return [*map(str, ("--hdp-tokens-per-rank", self.tokens_per_rank, *forms, *static, *stages)), *self.flags]

    def width(self, case: Case) -> str:
        """Return the static width in a case, or an empty text."""
        return self.static_width.format(num_ranks=case.num_ranks)

    def refusal(self, case: Case) -> str:
        """Return the reason why the arm cannot run in a case, or an empty text."""
        if self.static_width == "1" and case.context > self.tokens_per_rank:
            return (
                f"documents of up to {case.context} tokens do not fit on one rank, which holds C = "
                f"{self.tokens_per_rank} tokens"
            )
        if self.script.endswith("hybrid.py") and not math.log2(case.num_ranks).is_integer():
            return f"Megatron has hybrid groups for powers of two only, not for {case.num_ranks} ranks"
        if case.num_ranks % self.num_stages:
            return f"{case.num_ranks} ranks are not pipelines of {self.num_stages} stages"
        return ""


_STAGES = 2
_SLICES = Slicing(4)
_AHEAD = _SLICES.in_eager_order()
ARMS = {
    "ours": Arm("hybrid data parallelism", balance="dp", ring_forms="auto"),
    "plain": Arm("the same with plain rings only", balance="dp"),
    "naive": Arm("naive HDP (Algorithm 1)", ("--hdp-balance", "none"), balance="none"),
    "bytescale": Arm("Algorithm 2 as published", ("--hdp-balance", "bytescale"), balance="bytescale"),
    "static": Arm("static context parallelism over all ranks", static_width="{num_ranks}", balance="dp"),
    "packed": Arm("plain data parallelism with packing", static_width="1", balance="dp"),
    "hybrid": Arm("Megatron's hybrid plan, its barriers", script="scripts/bench/cluster/hybrid.py"),
    "pipelines": Arm("hybrid data parallelism, 2 stages, 1F1B", num_stages=_STAGES),
    "slices": Arm(f"the same in {_SLICES.num_slices} slices (Seq1F1B)", tuple(flags_of(_SLICES)), num_stages=_STAGES),
    _AHEAD.order: Arm(
        f"the same in {_AHEAD.num_slices} {_AHEAD.order} slices", tuple(flags_of(_AHEAD)), num_stages=_STAGES
    ),
}


@dataclass(frozen=True)
class Planned:
    """A case and the arms that run in it."""

    case: Case
    arms: tuple[str, ...]


_MAIN = ("ours", "naive", "bytescale", "static", "hybrid")
_PIPELINES = ("pipelines", "slices", _AHEAD.order)
QUICK = (
    Planned(Case("byted", 2, 4), (*_MAIN, "packed")),
    Planned(Case("github", 1, 8), _MAIN),
    Planned(Case("wikipedia", 4, 2), ("ours", "naive", "static", "hybrid")),
    Planned(Case("byted", 2, 4, "slow"), ("ours", "static", "hybrid")),
    Planned(Case("byted", 2, 4, "unlimited"), ("ours", "static", "hybrid")),
    Planned(Case("byted", 2, 4, context=TOKENS_PER_RANK), ("ours", "packed")),
    Planned(Case("byted", 1, 8), ("ours", "naive", *_PIPELINES)),
)
"""The cases of ``--quick``, the most informative first."""

FULL = (
    *(
        Planned(
            Case(sampler, nodes, 8 // nodes, link),
            (*_MAIN, *("plain",) * (nodes > 1), *_PIPELINES * (nodes == 1 and link == "matched")),
        )
        for link in ("matched", "slow", "unlimited", "fast")
        for sampler in ("byted", "github", "wikipedia")
        for nodes in (2, 1, 4)
    ),
    *(Planned(Case(sampler, 2, 4, context=TOKENS_PER_RANK), ("ours", "packed")) for sampler in ("byted", "github")),
    Planned(Case("byted", 2, 8), ("ours", "static", "hybrid")),
)
"""All cases."""


def with_names(planned: tuple[Planned, ...], names: list[str] | None, arms: list[str] | None) -> tuple[Planned, ...]:
    """Return ``planned``, or the named cases with all main arms; ``arms`` replaces the arms. Raises ValueError."""
    if names is not None:
        planned = tuple(Planned(Case.parse(name), _MAIN) for name in names)
    return planned if arms is None else tuple(Planned(row.case, tuple(arms)) for row in planned)
