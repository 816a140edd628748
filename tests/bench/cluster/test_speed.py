"""The cluster benchmark without a cluster: its data, its comparison of arms and its table."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bytescale_ext.measure.metrics import append_jsonl
from bytescale_ext.measure.timeline import Span
from scripts.bench.cluster import speed
from scripts.cluster.topology import Topology

CASE = speed.Case(Topology(1, 2, 0.0, 0.0, cores_per_rank=0.5), "byted", num_steps=3, seed=4)


def steps_of(speeds: list[float], loss: float = 2.0) -> list[dict[str, float]]:
    return [
        {"tokens_per_second": speed, "megabytes_sent_per_step": 3.0, "measured_imbalance": 1.1, "lm loss": loss}
        for speed in speeds
    ]


def test_documents_are_random_tokens_of_the_lengths_of_the_sampler(tmp_path: Path) -> None:
    for name in ("one", "again"):
        speed.write_documents(CASE, tmp_path / name)
    data = IndexedDataset(str(tmp_path / "one"))
    assert len(data) == CASE.documents_per_step * CASE.num_steps == 2 * speed.DOCUMENTS_PER_RANK * 3
    lengths = data.sequence_lengths
    assert speed.SHORTEST == lengths.min() < lengths.max() <= speed.CONTEXT
    assert max(np.max(data[i]) for i in range(len(data))) == 255
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"again{suffix}").read_bytes()


def test_speeds_are_compared_step_by_step_without_the_first() -> None:
    ours = [steps_of([1.0, 30.0, 60.0]), steps_of([2.0, 45.0])]
    figures = speed.compare({"ours": ours, "static": [steps_of([99.0, 20.0, 30.0], loss=2.5), steps_of([9.0, 30.0])]})
    assert figures["arms"]["ours"] == {
        "tokens_per_second": 45.0, "megabytes_sent_per_step": 3.0, "measured_imbalance": 1.1
    }  # fmt: skip
    assert figures["speedup"] == {"static": {"median": 1.5, "lowest": 1.5, "highest": 2.0}}
    assert figures["largest_loss_difference"] == pytest.approx(0.2)


def test_one_arm_is_compared_with_nothing() -> None:
    figures = speed.compare({"ours": [steps_of([1.0, 2.0])]})
    assert figures["speedup"] == {}
    assert figures["largest_loss_difference"] == 0.0


def test_the_table() -> None:
    figures = speed.compare({"ours": [steps_of([1.0, 3000.0])], "static": [steps_of([1.0, 2000.0])]})
    head, names, ours, static, losses = speed.table(CASE, figures).splitlines()
    assert head.startswith(
        "byted 1:32, context 16384, C = 2048; 1 nodes x 2 ranks of 0.5 core; links inside a node unl"
    )
    assert head.endswith("between nodes unlimited; 2 steps a round of 64 documents")
    assert names.split() == ["tokens/s", "MB", "sent/step", "imbalance", "ours", "is"]
    assert ours.split() == ["ours", "3,000", "3.0", "1.10"]
    assert static.split() == ["static", "2,000", "3.0", "1.10", "1.50x", "(1.50", "to", "1.50)"]
    assert losses == "losses of the arms differ by 0.0e+00 at most"


def test_arms_take_turns_and_two_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every other round runs the arms in reverse; the traced step of the first round is drawn."""
    order = []

    def run_arm(case: speed.Case, arm: str, prefix: Path, folder: Path, timeline: bool) -> list[dict[str, float]]:
        """Stand in for a training run."""
        order.append((arm, timeline))
        if timeline:
            spans = [Span(3, rank, "forward", 0, 0.0, 1.0 + (arm == "static")) for rank in range(2)]
            for span in spans:
                append_jsonl(folder / "timeline" / f"rank{span.rank}.jsonl", [asdict(span)])
        return steps_of([1.0, 2.0, 3.0])

    monkeypatch.setattr(speed, "run_arm", run_arm)
    args = argparse.Namespace(arms=["ours", "naive", "static"], rounds=2, plot=tmp_path / "two.png")
    found = speed.run_rounds(CASE, args, tmp_path)
    names = ["ours", "naive", "static"]
    assert order == [*((name, True) for name in names), *((name, False) for name in reversed(names))]
    assert all(len(rounds) == 2 for rounds in found.values())
    speed.draw(tmp_path, ["ours", "static"], found, args.plot)
    assert args.plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words", [["--nodes", "0"], ["--rounds", "0"], ["--steps", "2"], ["--plot", "no-such-folder/a.png"]]
)
def test_bad_sizes_are_one_line_and_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["speed.py", *words])
    assert speed.main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("speed.py: error: ")
    assert shown.err.count("\n") == 1
