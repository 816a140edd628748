"""The profile of the training bench: its command and its figures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from scripts.bench.plan.gpu_profile import figures_of, profile_command


def test_the_model_is_that_of_the_training_bench() -> None:
    command = profile_command(Path("h100.json"), on_cpu=False)
    assert command[1:5] == ["-m", "megatron.bytescale.cli", "profile", "--json"]
    flags = command[command.index("--") :]
    assert "--bf16" in flags
    widths = [word for flag, word in pairwise(flags) if flag == "--hidden-size"]
    assert widths[-1] == "4096"
    assert "--cpu" in profile_command(Path("x.json"), on_cpu=True)


def test_the_largest_error_is_the_headline() -> None:
    printed = 'a warning\n{"cost": {}, "unseen": [{"error": -0.25}, {"error": 0.1}]}\n'
    assert figures_of(printed)["largest_error"] == 0.25
    assert figures_of('{"unseen": []}')["largest_error"] == 0.0
