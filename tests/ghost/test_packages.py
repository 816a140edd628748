"""Trainings with played flash-attn packages: they are found, probed in a child process, and called."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.attention.kernels.table import choose_kernel
from tests.e2e.training import step_losses, train_ranks
from tests.ghost.cases import HALF_TOLERANCE, Case
from tests.ghost.devices import GHOST_GPUS, needs_ghosts
from tests.ghost.training import train_drawn, train_on_cpus
from tests.harness import ranks_on, run_ranks

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


def choose_with_version_4_in_torch(rank: int, world: int) -> str:
    """Return why torch's flash attention is passed over where torch calls flash-attn 4, and the kernel that is used."""
    import sys

    import torch

    sys.path.insert(0, str(Path(__file__).parent / "packages"))
    torch.nn.attention.activate_flash_attention_impl("FA4")
    sys.path.pop(0)  # otherwise the first kernel of the table would be flash-attn's own
    choice = choose_kernel("cuda", torch.bfloat16, 64)
    return f"{choice.kernel.name}: {dict(choice.considered)['torch_flash']}"


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
    words = Case(name, num_ranks, flags).argv(corpus, tmp_path / "ghost")
    with ranks_on(GHOST_GPUS):
        outcomes = train_ranks(num_ranks, *words, entry=train_with_packages)
    (line,) = [line for line in outcomes[0].text.splitlines() if "attention kernel" in line]
    assert f"attention kernel {name} (" in line
    assert reason in line
    plain = Case(name, num_ranks, flags.split(" --hdp-attention-kernel")[0])
    train_on_cpus(num_ranks, *plain.argv(corpus, tmp_path / "cpu"))
    assert step_losses(tmp_path / "ghost") == pytest.approx(step_losses(tmp_path / "cpu"), rel=HALF_TOLERANCE)


def test_torch_with_version_4_inside_is_passed_over() -> None:
    """Torch 2.13 expects two results of flash-attn 4, whose release 4.0.0b27 returns four. Our row calls it itself."""
    with ranks_on(GHOST_GPUS):
        (found,) = run_ranks(choose_with_version_4_in_torch, 1)
    assert found == "torch_efficient: its probe failed: ValueError: too many values to unpack (expected 2)"
