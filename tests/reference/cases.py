"""Combinations of models, lengths, ranks, parallelism and policies, generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.e2e.pipelines import FULL, SELECTIVE, UNALIGNED
from tests.reference.kinds import BY_HAND, KINDS
from tests.reference.settings import Settings
from tests.reference.training import OPTIMIZERS, Sizes

SEED = 41
RUNS_PER_KIND = 3
TENSOR = "--tensor-model-parallel-size 2".split()
SEQUENCE = [*TENSOR, "--sequence-parallel"]
PIPELINE = "--pipeline-model-parallel-size 2".split()
EXPERT = "--expert-model-parallel-size 2".split()
SLICES = "--seq1f1b-slices 3".split()
OTHER_SEEDS = {"one_expert-2-full-adam-128": 3, "balanced_steps-4-zero1-adam-256": 5}
"""Seeds of documents, for combinations that otherwise have a token with two experts of nearly equal scores."""


@dataclass(frozen=True)
class Layout:
    """Ranks of a run, and the flags that divide the model between them."""

    ranks: int
    flags: Sequence[str] = ()
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def hdp_ranks(self) -> int:
        """The number of ranks that share documents."""
        return self.ranks // (self.sizes.tensor * self.sizes.stages)


LAYOUTS = {
    "one": Layout(1),
    "2": Layout(2),
    "4": Layout(4),
    "4-zero1": Layout(4, UNALIGNED),
    "tp2": Layout(2, SEQUENCE, Sizes(tensor=2)),
    "4-tp2": Layout(4, TENSOR, Sizes(tensor=2)),
    "pp2": Layout(2, PIPELINE, Sizes(stages=2)),
    "4-pp2": Layout(4, PIPELINE, Sizes(stages=2)),
    "slices": Layout(1, SLICES),
    "2-slices": Layout(2, SLICES),
    "pp2-slices": Layout(2, [*PIPELINE, *SLICES], Sizes(stages=2)),
    "4-tp2-slices": Layout(4, [*SEQUENCE, *SLICES], Sizes(tensor=2)),
}
EXPERT_LAYOUTS = {
    "ep2": Layout(2, EXPERT, Sizes(expert=2)),
    "4-ep2": Layout(4, EXPERT, Sizes(expert=2)),
    "4-ep2-pp2-slices": Layout(4, [*EXPERT, *PIPELINE, *SLICES], Sizes(stages=2, expert=2)),
}
POLICIES = {
    "": [],
    "full": FULL,
    "selective": SELECTIVE,
    "memo": "--activation-policy memo --host-memory-gb 0.05 --hdp-learn-costs off".split(),
    "offload": "--swap-fraction 0.5 --host-memory-gb 0.05".split(),
    "chunks": "--chunked-cross-entropy 24".split(),
}


@dataclass(frozen=True)
class Case:
    """A combination.

    Attributes:
        length: ``--seq-length``.
        turn: earlier combinations of the kind.
    """

    kind: str
    layout: str
    policy: str
    optimizer: str
    length: int
    turn: int

    @property
    def name(self) -> str:
        parts = (self.kind.replace(" ", "_"), self.layout, self.policy, self.optimizer, str(self.length))
        return "-".join(part for part in parts if part)

    @property
    def seed(self) -> int:
        """Seed of the documents' tokens."""
        return OTHER_SEEDS.get(self.name, self.turn)

    @property
    def layout_value(self) -> Layout:
        return (LAYOUTS | EXPERT_LAYOUTS)[self.layout]

    @property
    def tokens_per_rank(self) -> int:
        """``--hdp-tokens-per-rank``: the longest sample needs all ranks that share documents."""
        return self.length // self.layout_value.hdp_ranks

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document around all limits of lengths: twelve samples or conversations."""
        c, longest = self.tokens_per_rank, self.length
        around = (c - 1, c, c + 1) if c < longest else (17, 100, 30)
        lengths = (1, 2, *around, longest - 1, longest, longest + 1, 2 * longest + 1)
        return (*lengths, 60, 61, 62, 63) if KINDS[self.kind].only_answers else lengths

    def flags(self) -> list[str]:
        sizes = self.layout_value.sizes
        return [
            *OPTIMIZERS[self.optimizer],
            *self.layout_value.flags,
            *POLICIES[self.policy],
            *f"--hdp-tokens-per-rank {self.tokens_per_rank}".split(),
            *f"--make-vocab-size-divisible-by {128 // sizes.tensor}".split(),
        ]


def is_allowed(settings: Settings, layout: str, policy: str, optimizer: str) -> bool:
    """Return whether a run accepts the combination; ``bytescale doctor --refusals`` gives the reasons."""
    if policy in ("memo", "offload") and (settings.latent or settings.depths):
        return False
    if optimizer == "sgd" and layout == "4-zero1":
        return False
    if settings.depths and "--sequence-parallel" in (LAYOUTS | EXPERT_LAYOUTS)[layout].flags:
        return False
    return settings.experts is None or layout != "4-tp2"  # experts need sequence parallelism


def generated() -> Iterator[Case]:
    """Generate the combinations: each kind in ``RUNS_PER_KIND`` of them, all layouts and policies in turn."""
    chance = random.Random(SEED)
    turns: dict[str, list[str]] = {"layout": [], "expert": [], "policy": [], "optimizer": [], "length": []}
    choices = {
        "layout": list(LAYOUTS),
        "expert": [*LAYOUTS, *EXPERT_LAYOUTS, *EXPERT_LAYOUTS],
        "policy": list(POLICIES),
        "optimizer": list(OPTIMIZERS),
        "length": ["128", "256"],
    }

    def draw(of: str) -> str:
        if not turns[of]:
            turns[of] = chance.sample(choices[of], len(choices[of]))
        return turns[of].pop()

    for turn in range(RUNS_PER_KIND):
        for kind, settings in KINDS.items():
            if kind in BY_HAND:
                continue
            of = "expert" if settings.experts else "layout"
            words = [draw(of), draw("policy"), draw("optimizer")]
            while not is_allowed(settings, *words):
                words = [draw(of), draw("policy"), draw("optimizer")]
            yield Case(kind, *words, int(draw("length")), turn)


OTHER_CASES = [
    Case("later tokens", "2-slices", "memo", "adam", 256, 0),
    Case("later token", "4-pp2", "offload", "sgd", 128, 1),
    Case("balanced documents", "4-ep2-pp2-slices", "full", "sgd", 256, 0),
    Case("balanced documents", "4-tp2-slices", "", "adam", 128, 1),
    Case("balanced documents", "4", "selective", "sgd", 256, 2),
    Case("balanced steps", "4-zero1", "", "adam", 256, 0),
    Case("balanced steps", "pp2-slices", "full", "sgd", 128, 1),
    Case("balanced steps", "2", "full", "sgd", 256, 2),
    Case("balanced latent later tokens", "4-pp2", "", "adam", 256, 2),
    Case("balanced latent later tokens", "2-slices", "full", "sgd", 128, 1),
    Case("balanced answers", "2-slices", "", "sgd", 256, 0),
    Case("balanced answers", "4-pp2", "full", "adam", 128, 1),
    Case("projected experts", "4-ep2-pp2-slices", "memo", "adam", 256, 0),
    Case("projected experts", "4-tp2-slices", "full", "sgd", 128, 1),
    Case("projected experts", "4-ep2", "offload", "sgd", 128, 2),
    Case("projected softmax experts", "4", "", "adam", 256, 0),
    Case("projected softmax experts", "tp2", "selective", "adam", 128, 1),
    Case("projected softmax experts", "4-zero1", "chunks", "adam", 256, 2),
    Case("projected later tokens", "4-pp2", "full", "adam", 128, 0),
    Case("projected later tokens", "2-slices", "", "sgd", 256, 1),
    Case("clipped", "4-zero1", "", "adam", 256, 0),
    Case("clipped", "4-tp2-slices", "full", "adam", 128, 1),
    Case("clipped", "4-pp2", "memo", "sgd", 256, 2),
    Case("clipped window and sinks", "4-tp2", "selective", "adam", 256, 0),
    Case("clipped window and sinks", "pp2-slices", "", "sgd", 128, 1),
    Case("clipped latent", "2-slices", "full", "adam", 256, 0),
    Case("clipped latent", "4-pp2", "selective", "sgd", 128, 1),
    Case("clipped later tokens", "2", "", "adam", 128, 0),
]
CASES = [*generated(), *OTHER_CASES]
