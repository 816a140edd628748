"""Trainings with played flash-attn packages: they are found, probed in a child process, and called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import step_losses, train_ranks
from tests.ghost.cases import HALF_TOLERANCE, Case
from tests.ghost.devices import GHOST_GPUS, needs_ghosts
from tests.ghost.training import train_drawn, train_on_cpus
from tests.harness import ranks_on

pytestmark = [pytest.mark.ranks, pytest.mark.full, needs_ghosts]

LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--num-attention-heads 2 --hdp-tokens-per-rank 256"
)
RINGS = "--hdp-tokens-per-rank 128"


def train_with_packages() -> None:
    """Entry of a machine with flash-attn 3 and 4. Child processes have the kernels of ghost GPUs too."""
    import sys

    here = Path(__file__).parent
    sys.path[:0] = [str(here / "site"), str(here / "packages")]
    train_drawn()


def words_of(case: Case, corpus: Path, logs: Path) -> list[object]:
    """Return the flags of a training. Latent attention has no groups of queries."""
    words = case.argv(corpus, logs)
    start = words.index("--group-query-attention")
    return [*words[:start], *words[start + 3 :]] if LATENT.split()[0] in words else words


@pytest.mark.parametrize(
    ("name", "num_ranks", "flags", "reason"),
    [
        ("flash_attn_3", 2, RINGS, "the first kernel of the table"),
        ("flash_attn_4", 2, f"{RINGS} --hdp-attention-kernel flash_attn_4", "requested by name"),
        ("flash_attn_4", 1, f"{LATENT} --hdp-attention-kernel flash_attn_4", "values of 128 are not padded"),
    ],
    ids=["version 3", "version 4", "version 4, two widths"],
)
def test_losses_equal_cpu_ranks(
    name: str, num_ranks: int, flags: str, reason: str, corpus: Path, tmp_path: Path
) -> None:
    words = words_of(Case(name, num_ranks, flags), corpus, tmp_path / "ghost")
    with ranks_on(GHOST_GPUS):
        outcomes = train_ranks(num_ranks, *words, entry=train_with_packages)
    (line,) = [line for line in outcomes[0].text.splitlines() if "attention kernel" in line]
    assert f"attention kernel {name} (" in line
    assert reason in line
    plain = Case(name, num_ranks, flags.split(" --hdp-attention-kernel")[0])
    train_on_cpus(num_ranks, *words_of(plain, corpus, tmp_path / "cpu"))
    assert step_losses(tmp_path / "ghost") == pytest.approx(step_losses(tmp_path / "cpu"), rel=HALF_TOLERANCE)
