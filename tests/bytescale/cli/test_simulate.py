from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from megatron.bytescale import cli
from megatron.bytescale.cli import simulate as command

LAYER = CostModel(a=4e-11, b=2e-6, c=2e-7, g=1e-4)
COST = ModelCost(LLAMA_7B, "a GPU", "bfloat16", 1, "test", LAYER, LAYER, 1e-6, 1e-6, 1.0, 1.0)
ONE_STEP = ("--seeds", 1)
SMALL = "--seq-length 32K --ranks 8 --tokens-per-rank 8K --global-tokens 256K --seeds 2".split()
FIGURES = {
    "makespan_over_bound", "makespan_over_1f1b_bound", "speedup_over_static", "makespan", "idle_share",
    "exposed_communication", "forwards_per_rank", "peak_tokens", "kept_keys", "device_bytes", "host_bytes",
    "distinct_peers", "planning_seconds",
}  # fmt: skip


def run(*words: object) -> int:
    return cli.main(["simulate", *(str(word) for word in words)])


def test_json_of_all_schedulers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sampler", "byted", *SMALL, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value) == ["scenario", "schedulers"]
    scenario = value["scenario"]
    assert (scenario["sampler"], scenario["context"], scenario["ranks"], scenario["stages"]) == ("byted", 32768, 8, 1)
    assert (scenario["tokens_per_rank"], scenario["global_tokens"], scenario["seeds"]) == (8192, 262144, 2)
    assert list(value["schedulers"]) == ["static", "megatron-hybrid", "naive", "bytescale", "ours"]
    for figures in value["schedulers"].values():
        assert set(figures) == FIGURES
        assert all(set(figure) == {"mean", "worst"} for figure in figures.values())
        assert 1 <= figures["makespan_over_bound"]["mean"] <= figures["makespan_over_bound"]["worst"]
        assert figures["makespan_over_1f1b_bound"] == figures["makespan_over_bound"]  # nothing runs in slices
        assert figures["speedup_over_static"]["worst"] <= figures["speedup_over_static"]["mean"]
    assert value["schedulers"]["static"]["speedup_over_static"] == {"mean": 1.0, "worst": 1.0}
    assert (
        value["schedulers"]["megatron-hybrid"]["forwards_per_rank"]["mean"]
        > (value["schedulers"]["ours"]["forwards_per_rank"]["mean"])
    )


@pytest.mark.slow
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sampler", "github", *SMALL, "--pipeline-parallel", 2, "--schedulers", "ours,megatron-hybrid") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("github, context 32K, 8 ranks x 2 stages, C 8K, 256K tokens a step, 2 seeds")
    assert lines[3].split()[:4] == ["time", "/", "bound", "over"]
    assert lines[4].startswith("ours  ")
    assert len(lines) == 6
    assert lines[5] == "megatron-hybrid: not applicable, --hybrid-context-parallel refuses pipelines"


LAYER_BYTES = sum(tensor.bytes_per_token for tensor in layer_tensors(shipped("bytescale_7b").shape))
"""Bytes that a token always keeps in a layer decide which keys are kept, as in training."""


@pytest.mark.slow
def test_slices(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans of this project run in slices, Megatron's static mesh does not."""
    words = (
        "--sampler",
        "github",
        "--device",
        "bytescale",
        *SMALL,
        *ONE_STEP,
        "--pipeline-parallel",
        4,
        "--schedulers",
        "static,naive,ours",
        "--json",
    )
    assert run(*words) == 0
    plain = json.loads(capsys.readouterr().out)["schedulers"]
    assert run(*words, "--slices", 3) == 0
    value = json.loads(capsys.readouterr().out)
    sliced = value["schedulers"]
    # Slices free 4 C - 2 C of activations, minus the sums of 2/3 C. Kept keys use these bytes: 4,096 bytes in 6
    # slices of 1/3, and twice as many in the sums of 2/3.
    assert value["scenario"]["slicing"]["num_slices"] == 3
    sums = 4 / 3 * 4096
    assert value["scenario"]["slicing"]["kept_tokens"] == int(8192 * (2 * LAYER_BYTES - sums) / (2 * 4096 + sums))
    for name, figures in sliced.items():
        assert figures["makespan_over_bound"]["mean"] >= 1
        assert (figures["makespan"] == plain[name]["makespan"]) == (name == "static")
    for figure in ("makespan", "peak_tokens", "makespan_over_1f1b_bound"):
        assert sliced["ours"][figure]["mean"] < plain["ours"][figure]["mean"]
    assert run(*words[:-1], "--slices", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 ranks x 4 stages in 3 slices, keys kept up to" in lines[0]
    assert "time / 1F1B bound" in lines[3]
    assert "kept keys" in lines[3]
    assert run(*words, "--slices", 3, "--kept-keys", 0) == 0
    travelling = json.loads(capsys.readouterr().out)["schedulers"]["ours"]
    assert travelling["kept_keys"]["worst"] == 0 < sliced["ours"]["kept_keys"]["worst"]
    assert travelling["makespan"]["mean"] > sliced["ours"]["makespan"]["mean"]
    assert run(*words, "--slices", 3, "--eager") == 0
    eager = json.loads(capsys.readouterr().out)
    assert eager["scenario"]["slicing"]["eager"]
    assert eager["scenario"]["slicing"]["kept_tokens"] == int(8192 * (LAYER_BYTES - sums) / (3 * 4096 + sums))
    assert eager["schedulers"]["ours"]["makespan"]["mean"] < sliced["ours"]["makespan"]["mean"]
    assert eager["schedulers"]["ours"]["peak_tokens"]["mean"] > sliced["ours"]["peak_tokens"]["mean"]
    for option in (("--kept-keys", 5), ("--eager",)):
        assert run(*words, *option) == 2
        assert "needs --slices" in capsys.readouterr().err


def test_lengths_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5000, 40000, 300, 20000, 7000] * 20))
    assert run("--lengths", tmp_path / "lengths.npy", *SMALL, "--schedulers", "naive", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["scenario"]["lengths"].endswith("lengths.npy")
    assert "sampler" not in value["scenario"]
    args = parsed("--lengths", tmp_path / "lengths.npy", *SMALL)
    one, other = command.draw_steps(args)
    assert one != other
    assert max(one) == 20000
    assert 262144 - 20000 < sum(one) <= 262144
    assert command.draw_steps(args) == [one, other]


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_ranks_of_unlike_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    """The planner that knows the speeds is far ahead of planners that do not."""
    words = ("--sampler", "github", *SMALL, *ONE_STEP, "--schedulers", "ours,naive", "--json")
    ratios = {}
    for speeds in ("1x8", "1x4,0.5x4"):
        assert run(*words, "--speeds", speeds) == 0
        rows = json.loads(capsys.readouterr().out)["schedulers"]
        ratios[speeds] = rows["naive"]["makespan"]["mean"] / rows["ours"]["makespan"]["mean"]
        assert rows["ours"]["makespan_over_bound"]["mean"] >= 1
    assert ratios["1x4,0.5x4"] > 1.2 * ratios["1x8"]


@pytest.mark.slow
def test_a_cost_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cost.json").write_text(json.dumps(COST.to_json()))
    words = ("--cost-file", tmp_path / "cost.json", "--plot", tmp_path / "bars.png", "--schedulers", "static,naive")
    assert run("--sampler", "sft", *SMALL, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["scenario"]["cost"]["device"] == "a GPU"
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_tokens_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5000, 40000]))
    assert run("--lengths", tmp_path / "lengths.npy", *SMALL, "--seq-length", "4096") == 2
    assert "has 5,000 tokens: raise --seq-length 4096" in capsys.readouterr().err
    assert run("--lengths", tmp_path / "lengths.npy", *SMALL) == 2
    assert "holds 5000 tokens in documents of at most 32768, fewer than" in capsys.readouterr().err


def test_no_static_mesh_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sampler", "github", *SMALL, "--ranks", 6, "--schedulers", "static,naive", "--json") == 0
    schedulers = json.loads(capsys.readouterr().out)["schedulers"]
    assert schedulers["static"] == {"not_applicable": "context parallelism of 4 does not divide 6 ranks"}
    assert schedulers["naive"]["speedup_over_static"] is None
    assert run("--sampler", "github", *SMALL, "--ranks", 6, "--schedulers", "naive") == 0
    assert " - " in capsys.readouterr().out


@pytest.mark.slow
def test_chosen_slices_hold_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--sampler",
        "github",
        *SMALL,
        *ONE_STEP,
        "--pipeline-parallel",
        4,
        "--schedulers",
        "static,ours",
        "--json",
    )
    assert run(*words) == 0
    whole = json.loads(capsys.readouterr().out)["schedulers"]
    assert run(*words, "--slices", "auto", "--device-memory-gb", 60) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["scenario"]["chosen_within_gb"] == 60
    assert value["schedulers"]["static"]["makespan"] == whole["static"]["makespan"]
    assert value["schedulers"]["ours"]["makespan"]["mean"] < whole["ours"]["makespan"]["mean"]
    assert value["schedulers"]["ours"]["device_bytes"]["worst"] <= 60e9


@pytest.mark.slow
def test_swapped_keys_are_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    slices = "--pipeline-parallel 2 --schedulers ours --slices 3 --kept-keys 0".split()
    words = ("--sampler", "github", *SMALL, *ONE_STEP, *slices)
    assert run(*words) == 0
    assert "host GB" not in capsys.readouterr().out
    assert run(*words, "--swapped-keys", "32768") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "in 3 slices, keys kept up to 0 tokens, in host memory up to 32768" in lines[0]
    assert "host GB" in lines[3]
    found = []
    for speed in (55, 5):
        assert run(*words, "--swapped-keys", "32768", "--link-gb-per-second", speed, "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["schedulers"]["ours"])
    assert found[0]["host_bytes"]["worst"] > 0
    assert found[0]["kept_keys"]["worst"] == 0
    assert found[0]["makespan"]["mean"] < found[1]["makespan"]["mean"]


@pytest.mark.parametrize("speeds", ["1e308,1e-308", "nan,1", "inf,1", "0,1", "1x99999999999", "1x0"])
def test_speeds_have_limits(speeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--sampler", "github", *SMALL, "--speeds", speeds]) == 2
    assert "speeds are from 0.0001 to 10000, of 1 to 1,048,576 ranks" in capsys.readouterr().err
