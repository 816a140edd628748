"""``bytescale states`` at the lengths of a corpus: the overlap of copies, and the choice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from megatron.bytescale import cli
from megatron.bytescale.cli.shared.model_flags import shape_of_flags
from tests.bytescale.cli.states.test_command import SMALL, printed

MODEL = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --swiglu --vocab-size 32000"
WORDS = ("--model-flags", MODEL, "--device-memory-gb", "12", "--host-memory-gb", "30", "--state-stage", "2")


def hidden(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(printed(capsys, *WORDS, *words, "--json"))["hidden"]
    return found


def test_the_overlap_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *WORDS, "--sampler", "github", "--micro-batches", "4")
    line = re.search(r"^of ([\d.]+) GB that the fullest stage copies in a step, ([\d.]+)% overlap with computation and "
                     r"([\d.]+)% with Adam; the step waits ([\d.]+) ms for the link$", text, re.MULTILINE)  # fmt: skip
    assert line
    total, computing, adam, waited = map(float, line.groups())
    assert 0 < computing < 100
    assert waited == pytest.approx(total * (1 - (computing + adam) / 100) / 55 * 1e3, rel=0.05)
    assert text.splitlines()[-2].startswith("> bytescale: states auto (")
    assert "what else fits: " in text.splitlines()[-1]


@pytest.mark.slow
def test_lengths_of_a_file_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More copies overlap with long documents on a slow link, up to ``--seq-length``."""
    for name, length in (("short", 64), ("long", 200_000)):
        np.save(tmp_path / f"{name}.npy", np.full(16, length))
    slow = ("--link-gb-per-second", "2", "--tokens-per-rank", "1K")
    short, long, cut = (
        hidden(capsys, *slow, "--lengths", str(tmp_path / f"{name}.npy"), "--seq-length", context)
        for name, context in (("short", "128K"), ("long", "128K"), ("long", "1K"))
    )
    assert short["num_bytes"] == long["num_bytes"]
    assert long["computing_bytes"] > 2 * short["computing_bytes"]
    assert short["computing_bytes"] <= cut["computing_bytes"] < long["computing_bytes"]


@pytest.mark.slow
def test_costs_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = shape_of_flags(MODEL)
    write_cost(tmp_path / "slow.json", cost_of_rates(shape, 6.5e12, 6e12, 5e12))
    words = ("--tokens-per-rank", "256", "--link-gb-per-second", "2")
    fast, slow = hidden(capsys, *words), hidden(capsys, *words, "--cost-file", str(tmp_path / "slow.json"))
    assert slow["computing_bytes"] > fast["computing_bytes"]
    assert cli.main(["states", "--model-flags", SMALL, *words, "--cost-file", str(tmp_path / "slow.json")]) == 2
    assert "slow.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_choice_follows_the_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(device: str, *words: str) -> str:
        budgets = (*WORDS, "--device-memory-gb", device, "--tokens-per-rank", "4K", *words, "--json")
        text: str = json.loads(printed(capsys, *budgets))["auto"][0]
        return text

    assert ": resident: " in chosen("60")
    assert re.search(r"\(resident takes [\d.]+ GB of device memory\): stage 1: ", chosen("5"))
    assert "(the least predicted time)" in chosen("60", "--activation-policy", "priced", "--pipeline-parallel", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sampler", "none"], "--sampler none is unknown; choose one of"),
        (["--activation-policy", "most", "--tokens-per-rank", "8"], "--activation-policy most is unknown"),
        (["--activation-policy", "priced"], "--activation-policy needs --tokens-per-rank"),
        (["--tokens-per-rank", "8G"], "do not fit in 80 GB of device memory"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["states", "--model-flags", SMALL, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
