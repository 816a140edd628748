"""Each flag of positions changes the loss of the models that read it, and is refused by name for all others."""

from __future__ import annotations

import pytest

from tests.bytescale.arguments.felt import Felt, felt
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

COMMON = [*TRAIN, *HDP, "--hdp-tokens-per-rank", "256", "--data-path", "unread", "--cpu"]
WITHOUT_GROUPS = " ".join(MODEL).replace("--group-query-attention --num-query-groups 2", "").split()
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 12 --rope-type"
).split()
KINDS: dict[str, list[str]] = {
    "rope": [*MODEL, *COMMON],
    "scaled": [*MODEL, *COMMON, "--use-rope-scaling"],
    "yarn": [*MODEL, *COMMON, *"--position-embedding-type yarn --rotary-scaling-factor 8".split()],
    "learned": [*MODEL, *COMMON, "--position-embedding-type", "learned_absolute"],
    "none": [*MODEL, *COMMON, "--position-embedding-type", "none"],
    "latent rope": [*WITHOUT_GROUPS, *COMMON, *LATENT, "rope"],
    "latent yarn": [*WITHOUT_GROUPS, *COMMON, *LATENT, *"yarn --rotary-scaling-factor 8".split()],
}
ROTARY, PLAIN = {"rope", "scaled", "yarn", "latent rope", "latent yarn"}, {"rope", "scaled"}
YARN = {"yarn", "latent yarn"}
# (words, kinds that read them); all other kinds refuse them
FLAGS: list[tuple[str, set[str]]] = [
    ("--rotary-base 500", ROTARY),
    ("--rotary-percent 0.5", PLAIN | {"latent rope"}),
    ("--rotary-interleaved", PLAIN),
    ("--rotary-seq-len-interpolation-factor 4", PLAIN),
    ("--use-rope-scaling", {"rope"}),
    ("--rope-scaling-factor 3", {"scaled"}),
    ("--no-rope-freq 2", PLAIN | {"yarn"}),
    ("--yarn-original-max-position-embeddings 16", YARN),
    ("--yarn-beta-fast 2", YARN),
    ("--yarn-beta-slow 0.1", YARN),
    ("--no-yarn-correction-range-round-to-int", {"yarn"}),
    ("--rotary-scaling-factor 20", YARN),
    ("--mscale 2", YARN),
    ("--mscale-all-dim 2", YARN),
    ("--rotary-scaling-factor 20 --mscale-all-dim 2", YARN | {"latent rope"}),
]
# A kind that has the flag already: the flag changes nothing, and says so.
GIVEN = {("--use-rope-scaling", "scaled")}
CASES = [(words, kind) for words, _ in FLAGS for kind in KINDS if (words, kind) not in GIVEN]
READERS = dict(FLAGS)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Felt]:
    """What becomes of each kind, alone ("") and with each flag."""
    cases = [*(("", kind) for kind in KINDS), *CASES]
    found = felt(*([*KINDS[kind], *words.split()] for words, kind in cases))
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize(("words", "kind"), CASES)
def test_a_flag_is_felt_or_refused(words: str, kind: str, outcomes: dict[tuple[str, str], Felt]) -> None:
    alone, outcome = outcomes["", kind], outcomes[words, kind]
    assert not isinstance(alone, str), alone
    if kind in READERS[words]:
        assert not isinstance(outcome, str), outcome
        assert outcome != alone
    else:
        assert isinstance(outcome, str)
        assert words.split()[0].replace("--no-yarn", "--yarn") in outcome


def test_kinds_differ(outcomes: dict[tuple[str, str], Felt]) -> None:
    assert len({outcomes["", kind] for kind in KINDS}) == len(KINDS)
