"""Cost files of an H100 from published timings: the fit on timings of known constants, and the shipped files."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import SHIPPED, check_same_model, read_cost, shipped
from bytescale_ext.plan.cost.model_shape import linear_flops_per_token
from megatron.bytescale.cli import main as command
from scripts.bench.plan.h100_costs import LINEAR_TOKENS, MODELS, fit, main

SQUARE, TOKEN, START, PER_TOKEN, BYTES_PER_SECOND = 5e-11, 2e-9, 3e-5, 2e-6, 3e11


@pytest.fixture
def timings(tmp_path: Path) -> Path:
    """Return a folder with tables of exact times."""
    rows = ["L,cp,tp,duration_per_doc"]
    for length, cp, tp in product((256, 1024, 4096, 16384, 65536), (1, 2), (1, 4)):
        seconds = (SQUARE * length**2 + TOKEN * length) / cp / tp + START
        rows.append(f"{length},{cp},{tp},{1e3 * seconds}")
    (tmp_path / "compute-attn-H100.csv").write_text("\n".join(rows))
    rows = ["ctx_length\ttp\tcp\tmegatron.a\tmegatron.b"]
    rows += [
        f"32768\t{tp}\t{cp}\t{PER_TOKEN * LINEAR_TOKENS / cp * 1e3}\t{tp - 1}" for tp in (1, 2) for cp in (1, 2, 4)
    ]
    (tmp_path / "compute-mlp-only.bs2.tsv").write_text("\n".join(rows))
    rows = ["nelem,latency(ms)", "32,1000.0"]
    rows += [f"{1 << power},{1e3 * 14 * (1 << power) / BYTES_PER_SECOND}" for power in range(20, 30)]
    (tmp_path / "network-allgather-H100-8.csv").write_text("\n".join(rows))
    return tmp_path


def test_known_constants_are_fitted(timings: Path) -> None:
    fitted = fit(timings)
    assert (fitted.square, fitted.token, fitted.attention_start) == pytest.approx((SQUARE, TOKEN, START))
    assert fitted.bytes_per_second == pytest.approx(BYTES_PER_SECOND)
    flops = linear_flops_per_token(MODELS["h100_34b"]) - 2 * 8192 * 32000
    assert fitted.linear_flops == pytest.approx(flops / 48 / PER_TOKEN)
    assert all(worst < 1e-6 for _, worst, _ in fitted.errors.values())


def test_cost_files_are_written(timings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(timings), "--output", str(tmp_path)]) == 0
    assert "median error 0.0%" in capsys.readouterr().out
    cost = read_cost(tmp_path / "h100_34b.json")
    assert cost.forward.a == pytest.approx(SQUARE)
    assert cost.backward.a == pytest.approx(2.5 * SQUARE)
    assert read_cost(tmp_path / "h100_7b.json").forward.a == pytest.approx(SQUARE / 2)
    assert cost.forward.b == pytest.approx(PER_TOKEN + TOKEN)
    assert cost.forward.c == pytest.approx(2 * 8 * 128 * 2 / BYTES_PER_SECOND)
    assert (cost.forward.m, cost.backward.m) == pytest.approx((START, 2 * START)), "a block is one more launch"
    join = 10 / 3.35e12  # a number of 2 bytes is added to a total of 4, which is read and written
    assert cost.forward.h == pytest.approx(TOKEN + 64 * 128 * join)
    assert cost.backward.h == pytest.approx(2.5 * TOKEN + (64 + 2 * 8) * 128 * join)


def test_missing_tables_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", MODELS)
def test_shipped_files_name_their_source_and_their_errors(name: str) -> None:
    cost = shipped(name)
    assert check_same_model(cost, MODELS[name], 1, "bfloat16", name) == cost
    assert min(cost.forward.h, cost.backward.h, cost.forward.m, cost.backward.m) > 0, "no block of a ring is free"
    for words in ("DistCA", "median error", "Not measured there"):
        assert words in cost.source


def test_the_documentation_has_their_errors() -> None:
    text = (SHIPPED.parents[2] / "docs" / "results" / "costs.md").read_text()
    rows = re.findall(r"\| ([\d.]+) % \| ([\d.]+) % \|", text)
    parts = re.findall(r"median error ([\d.]+)%, worst ([\d.]+)%", shipped("h100_8b").source)
    assert rows == parts


def test_commands_take_the_shipped_cost_files(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SHIPPED / "h100_8b.json")
    words = "simulate --sampler github --seq-length 128K --ranks 16 --tokens-per-rank 8K --global-tokens 1M --json"
    assert command([*words.split(), "--seeds", "1", "--schedulers", "static,ours", "--cost-file", path]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["scenario"]["cost"] == {"file": path, "device": "NVIDIA H100 (published timings)"}
    assert figures["schedulers"]["ours"]["speedup_over_static"]["mean"] > 1
