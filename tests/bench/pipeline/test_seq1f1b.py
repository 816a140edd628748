"""The arms of the bench of Seq1F1B without a training, and its timed layer."""

from __future__ import annotations

import argparse
import json

import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale import features
from megatron.bytescale.features.slices.flags import flags_of
from scripts.bench.pipeline import gpu_seq1f1b, seq1f1b

PRINTED = "".join(f" elapsed time per iteration (ms): {ms} |\n" for ms in (900, 100, 100))


def printed(command: list[str]) -> str:
    """Return the output of a training whose passes take 1 second forward and 1 second backward per micro-batch."""
    k = int(command[command.index("--seq1f1b-slices") + 1])
    count = int(next(word for word in command if word.startswith("--global-batch-size")).split("=")[1])
    passes = [[kind, unit // k, unit % k, 0, 1 / k] for kind in "FB" for unit in range(count * k)]
    return PRINTED + "".join(f"PASSES {json.dumps([stage, passes])}\n" for stage in (0, 1))


def test_every_arm_trains_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(seq1f1b, "printed_by", lambda command: commands.append(command) or printed(command))
    arms = seq1f1b.measured_arms(seq1f1b.Sizes(16, 2, 32), 64, 4)
    figures = seq1f1b.speed(arms, steps=3, rounds=1)
    assert set(figures["step_seconds"].values()) == {0.1}  # the first step is left out
    assert [name for name in figures if name.startswith("speedup")] == ["speedup_even", "speedup_time", "speedup_eager"]
    slices = [command[command.index("--seq1f1b-slices") + 1] for command in commands]
    assert slices == ["1", "4", "4", "4"]
    assert ["--seq1f1b-eager" in command for command in commands] == [False, False, False, True]
    assert commands[0][-1] == "--seq1f1b-partition=64"
    assert commands[1][-1] == "--seq1f1b-partition=16,16,16,16"
    lengths = [arm.lengths for arm in seq1f1b.arms_of(64, 2, CostModel(1.0, 1.0)).values()]
    assert lengths == [(64,), (32, 32), (45, 19), (45, 19)]


def test_zero_bubble_is_compared_with_whole_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(seq1f1b, "printed_by", lambda command: commands.append(command) or printed(command))
    arms = seq1f1b.arms_of(64, 4, CostModel(1.0, 1.0))
    assert seq1f1b.zero_bubble(arms, steps=3, rounds=1) == {"1f1b": 1.0, "time": 1.0}
    slices = [command[command.index("--seq1f1b-slices") + 1] for command in commands]
    split = ["--seq1f1b-zero-bubble" in command for command in commands]
    assert list(zip(slices, split, strict=True)) == [("1", False), ("4", False), ("1", True), ("4", True)]


def test_gains_by_micro_batches_and_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With p = 2 and k = 4: (m + 1) / (m + 1 / 4)."""
    bounds = [seq1f1b.bound(2, count, 4) for count in (2, 4, 8, 16)]
    assert bounds == pytest.approx([3 / 2.25, 5 / 4.25, 9 / 8.25, 17 / 16.25])
    commands: list[list[str]] = []
    monkeypatch.setattr(seq1f1b, "printed_by", lambda command: commands.append(command) or printed(command))
    arms = {name: arm for name, arm in seq1f1b.arms_of(64, 4, CostModel(1.0, 1.0)).items() if name in ("1f1b", "time")}
    figures = seq1f1b.by_micro_batches(arms, (2, 8, 16), (2, 8), steps=3, rounds=2)
    assert figures[8] == {"bound": 1.091, "measured": [1.0, 1.0], "replayed": [1.091, 1.091]}
    assert figures[16] == {"bound": 1.046, "measured": [], "replayed": [1.046, 1.046]}
    sizes = [next(word for word in command if word.startswith("--global-batch-size")) for command in commands]
    assert sizes == [f"--global-batch-size={count}" for count in (2, 2, 8, 8)] * 2


def test_1f1b_is_one_slice_by_our_code() -> None:
    parser = argparse.ArgumentParser()
    for feature in features.FEATURES:
        feature.add_arguments(parser)
    args = parser.parse_args(flags_of(ONE_SLICE))
    assert features.enabled(args) == []
    with seq1f1b.one_slice_counts():
        assert [feature.name for feature in features.enabled(args)] == ["slices"]
    assert features.enabled(args) == []


@pytest.mark.slow
def test_the_overhead_of_slices_on_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_seq1f1b.main(["--device", "cpu", "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["split_overhead"]) == {"256/4", "256/8"}
    assert min(figures["split_overhead"].values()) > -1
