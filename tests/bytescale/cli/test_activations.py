from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from megatron.bytescale.cli import activations as command
from megatron.bytescale.cli.shared.model_flags import shape_of_flags

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu --vocab-size 32000 "
    "--bf16 --lr 1e-4"
)
TIED = 6_738_415_616 - 32000 * 4096
"""Return the number of parameters; embedding and output layer share a matrix."""


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model-flags", LLAMA, "--seq-length", 65536, "--activation-policy", "memo",
               "--chunked-cross-entropy", 4096, "--host-memory-gb", 1000, "--tflops", 650, 600, 500) == 0  # fmt: skip
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in out.splitlines() if line}
    assert "swap 100%" in rows["attention output"]
    assert "never" in rows["attention output"]
    assert "swap 58%, recompute 42%" in rows["query, key, value"]
    assert "alpha 0.58" in out
    lengths = [line.split()[0] for line in out.splitlines() if line and line.split()[0].isdigit()]
    assert lengths == [str(8192 << power) for power in range(8)]


def test_the_peak_has_parameters_and_optimizer_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model-flags",
        LLAMA,
        "--activation-policy",
        "none",
        "--chunked-cross-entropy",
        4096,
        "--seq-length",
        8192,
    ]
    peaks = {}
    for ranks in (1, 4):
        assert run(*words, "--optimizer-ranks", ranks) == 0
        out = capsys.readouterr().out
        row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["8192", "none"])
        device, peaks[ranks] = float(row[7]), float(row[8])
        states = (6 + 12 / ranks) * TIED / 1e9
        assert peaks[ranks] == pytest.approx(device + states, abs=0.02)
        assert f"peak: device memory with {states:.2f} GB of parameters, gradients and optimizer states" in out
    assert run(*words, "--optimizer-ranks", 4, "--json") == 0
    assert json.loads(capsys.readouterr().out)["state_bytes"] == 9 * TIED


def test_a_slower_link_has_another_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for link in (["--link-gb-per-second", 10], []):
        assert run("--model-flags", LLAMA, "--seq-length", 65536, "--activation-policy", "memo", "--json", *link) == 0
        found.append(json.loads(capsys.readouterr().out)["plan"])
    assert found[0] != found[1]


def test_experts_are_said_to_be_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model-flags", f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024",
               "--chunked-cross-entropy", 4096, "--seq-length", 8192) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "experts are not planned" in out
    assert "MLP first output" not in out


@pytest.mark.slow
def test_json_agrees_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model-flags", LLAMA, "--json", "--activation-policy", "priced", "--chunked-cross-entropy", 1024) == 0
    value = json.loads(capsys.readouterr().out)
    tensors = {row["name"]: row for row in value["tensors"]}
    assert tensors["layer input"]["bytes_per_token"] == 8192
    assert tensors["layer input"]["seconds_per_byte"] is None
    assert tensors["activation output"]["recompute"] == 1.0
    for row in value["tensors"]:
        assert row["swap"] + row["keep"] + row["recompute"] == pytest.approx(1)
    fitting = [row["forecast"] for row in value["lengths"] if row["plan"]]
    assert fitting
    assert all(row["device_bytes"] <= 100e9 * (1 + 1e-9) and row["host_bytes"] <= 100e9 * (1 + 1e-9) for row in fitting)
    assert value["lengths"][-1]["plan"] is None  # a million tokens do not fit


@pytest.mark.slow
def test_a_cost_file_gives_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = shape_of_flags(LLAMA)
    write_cost(tmp_path / "cost.json", cost_of_rates(shape, 1e12, 1e12, 1e12))
    assert run("--cost-file", tmp_path / "cost.json", "--model-flags", LLAMA, "--seq-length", 8192, "--json") == 0
    slow = json.loads(capsys.readouterr().out)["lengths"][0]["forecast"]["step_seconds"]
    assert run("--model-flags", LLAMA, "--seq-length", 8192, "--json") == 0
    assert json.loads(capsys.readouterr().out)["lengths"][0]["forecast"]["step_seconds"] < slow / 100
    with pytest.raises(ValueError, match="hidden"):
        run("--cost-file", tmp_path / "cost.json", "--model-flags", LLAMA.replace("4096", "2048"))
