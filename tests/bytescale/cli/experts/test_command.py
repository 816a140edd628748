"""``bytescale experts``: text and picture of a recorded trace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.bytescale import cli
from tests.bytescale.cli.test_bad_input import refusal
from tests.plan.experts.test_trace import written

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-router-topk 1 "
    "--moe-router-pre-softmax --moe-ffn-hidden-size 64 --swiglu"
)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Write a trace of 12 steps. In layer 2 expert 0, then expert 3, gets half of the tokens; layer 1 is even."""
    loads = [{"1": [[25] * 4] * 2, "2": [[55, 15, 15, 15] if step < 6 else [15, 15, 15, 55]] * 2} for step in range(12)]
    steps = [{"step": step, "loads": of_step} for step, of_step in enumerate(loads, 1)]
    file = written(tmp_path, {"experts": 4, "topk": 1, "ranks": 2}, *steps)
    return ["experts", "--trace", str(file), "--model-flags", MODEL, "--slots", "3"]


@pytest.mark.slow
def test_a_row_for_each_placement(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--plot", str(tmp_path / "loads.png")]) == 0
    assert (tmp_path / "loads.png").exists()
    heading, names, *rows = capsys.readouterr().out.splitlines()
    assert heading == "12 steps, 2 layers of 4 experts on 2 ranks"
    assert names.split()[:3] == ["placement", "busiest/mean", "p95"]
    assert [row.split()[0] for row in rows] == ["static", "flexmoe", "eplb"]
    assert rows[0].split()[1:3] == ["1.200", "1.400"]
    assert rows[0].split()[4:6] == ["1.000", "0"]


@pytest.mark.slow
def test_flexmoe_is_more_even_where_links_are_fast(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--json", "--exchange-gb-per-second", "1e6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flexmoe"]["ratio_mean"] < 1.05
    assert found["flexmoe"]["moves"] == 2
    assert found["flexmoe"]["step_seconds"] < 0.9 * found["static"]["step_seconds"]
    narrow = [*words, "--json", "--exchange-gb-per-second", "1e6", "--model-flags", f"{MODEL} --moe-latent-size 16"]
    assert cli.main(narrow) == 0
    latents = json.loads(capsys.readouterr().out)
    assert latents["static"]["step_seconds"] == pytest.approx(found["static"]["step_seconds"] / 4)
    assert cli.main([*words, "--json", "--exchange-gb-per-second", "0.1"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["flexmoe"]["moves"] == 0, "weights that travel longer than they save"
    assert cli.main([*words, "--json", "--exchange-gb-per-second", "1e6", "--threshold", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["flexmoe"]["moves"] == 0


BAD: list[tuple[list[str], str]] = [
    (["--trace", "/dev/null"], "/dev/null:1: not a line of an expert trace"),
    (["--model-flags", MODEL.replace("--num-experts 4", "")], "--moe-ffn-hidden-size without --num-experts"),
    (["--model-flags", f"{MODEL} --num-experts 8"], "another model: 4 experts and 1 for each.*has 8 and 1"),
    (["--slots", "1"], "--slots 1: a rank is the home of 2 of 4 experts: give at least 2"),
    (["--slots", "5"], "--slots 5: a rank is the home of 2 of 4 experts.*at most 4"),
    (["--threshold", "0.9"], "--threshold 0.9 must be at least 1"),
    (["--tflops", "0"], "--tflops 0 must be positive"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda value: "" if isinstance(value, str) else " ".join(value))
def test_bad_options_are_refused(
    bad: list[str], message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(message, refusal([*words, *bad], capsys))
