"""The GPU benches of activations run on CPU with tiny sizes, and every arm computes the same loss."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.measure.cost_file import read_cost
from tests.harness import run_ranks

ARMS = {"none", "full recompute", "full recompute, inputs on host", "recompute attention", "recompute MLP",
        "save_on_cpu", "keep attention output", "alpha 0", "memo", "priced"}  # fmt: skip
HOST_BOUND = ("none", "priced")
SCRIPTS = ("gpu_activations", "gpu_activations_calibrate", "gpu_memory_plan")
QUICK = ["script", "--device", "cpu", "--quick"]


def run_scripts(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run all scripts in one process and return their figures."""
    from bytescale_ext.measure.cost_file import write_cost
    from megatron.bytescale.cli import memory_plan
    from scripts.bench.activation import (
        gpu_activations,
        gpu_activations_calibrate,
        gpu_memory_plan,
    )

    figures: dict[str, Any] = {}
    figures["calibrate"], cost = gpu_activations_calibrate.calibrate(False, True, 2, num_processes=2)
    write_cost(Path(folder) / "cost.json", cost)
    sys.argv = [*QUICK, "--cost-file", f"{folder}/cost.json"]
    figures["activations"] = gpu_activations.run(gpu_activations.parse()[0])
    sys.argv = [*QUICK, "--host-bound", "--arms", *HOST_BOUND]
    figures["host bound"] = gpu_activations.run(gpu_activations.parse()[0])
    parser = argparse.ArgumentParser()
    memory_plan.add_arguments(parser)
    sys.argv = QUICK
    args = gpu_memory_plan.options()
    words = gpu_memory_plan.plan_command(args, Path(folder) / "plan.json")
    memory_plan.run(parser.parse_args(words[1:]))
    memory = gpu_memory_plan.read(Path(folder) / "plan.json")
    rows = [
        gpu_memory_plan.run_arm(arm, memory, False, args.host_memory_gb, args.steps) for arm in gpu_memory_plan.ARMS
    ]
    figures["memory plan"] = {"rows": rows, "buffer": memory.buffer_bytes, "bound": memory.plan.model.bound}
    return figures


def run_engine_arm(rank: int, world: int) -> dict[str, Any]:
    """Fake of the arm with Megatron's fine-grained offload, with Megatron's own layers instead of TransformerEngine's.

    It has the configuration, hooks and end of a step of the real arm; on CPU it moves nothing.
    """
    from megatron.core.extensions import transformer_engine

    from megatron.bytescale.training import one_device
    from scripts.bench.activation import gpu_activations

    entered: list[str] = []
    local = one_device._layer_spec
    one_device._layer_spec = lambda kernel, traits: local(kernel, replace(traits, transformer_impl="local"))
    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)  # of TransformerEngine
    end = one_device.end_fine_grained_step
    from scripts.bench.activation import activation_arms

    activation_arms.end_fine_grained_step = lambda: (entered.append("end"), end())
    sys.argv = [*QUICK, "--engine"]
    results = gpu_activations.run(gpu_activations.parse()[0])
    return {**results, "ends": len(entered)}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("scripts")
    results = dict(run_ranks(run_scripts, 1, str(folder), init_group=False)[0])
    return {**results, "cost": read_cost(folder / "cost.json")}


@pytest.mark.full
@pytest.mark.ranks
def test_arms_differ_in_everything_but_the_loss(figures: dict[str, Any]) -> None:
    rows = figures["activations"]["rows"]
    assert {row["num_tokens"] for row in rows} == {64, 130}
    for length in (64, 130):
        arms = {row["arm"]: row for row in rows if row["num_tokens"] == length}
        assert set(arms) >= ARMS
        assert {row["loss"] for row in arms.values()} == {arms["none"]["loss"]}
        assert all(row["step_seconds"] > 0 for row in arms.values())
        predicted = {arm for arm, row in arms.items() if row["predicted_peak_gb"]}
        assert predicted == {arm for arm in arms if "recompute" not in arm} - {"save_on_cpu"}
        assert arms["none"]["swapped_bytes"] == arms["save_on_cpu"]["recomputed_flops"] == 0
        most = arms["keep attention output"]["recomputed_flops"]
        assert most == arms["alpha 0"]["recomputed_flops"] > 0  # with equally many layers
        assert most >= arms["memo"]["recomputed_flops"]
        assert arms["alpha 0"]["swapped_bytes"] > 0
        moved = {arm for arm, row in arms.items() if row["stall_seconds"]}
        assert moved >= {"alpha 0", "memo", "full recompute, inputs on host"}
        assert "none" not in moved
        assert arms["save_on_cpu"]["stall_seconds"] is None
        assert arms["priced"]["alpha"] == 0.0  # everything fits, so nothing is swapped or recomputed
    assert "alpha 0.5" in {row["arm"] for row in rows}
    assert set(figures["activations"]["layer_forward_seconds"]) == {64, 130}
    assert {target["text"].split(":")[0] for target in figures["activations"]["targets"]} >= {"64", "130"}


@pytest.mark.full
@pytest.mark.ranks
def test_a_host_bound_model_runs_the_chosen_arms(figures: dict[str, Any]) -> None:
    rows = figures["host bound"]["rows"]
    assert {(row["num_tokens"], row["arm"]) for row in rows} == {(n, arm) for n in (64, 130) for arm in HOST_BOUND}
    losses = {row["num_tokens"]: row["loss"] for row in figures["activations"]["rows"]}
    assert all(row["loss"] == losses[row["num_tokens"]] for row in rows)


@pytest.mark.full
@pytest.mark.ranks
def test_the_longest_sequences_are_searched(figures: dict[str, Any]) -> None:
    """On CPU the limit is counted and norms are not fused, so only the order of the arms is meaningful."""
    longest = figures["activations"]["longest_tokens"]
    assert all(tokens % 32 == 0 for tokens in longest.values())
    assert 0 < longest["none"] < longest["full recompute"] <= longest["keep attention output"] < 512
    assert figures["host bound"]["longest_tokens"] == {}


@pytest.mark.full
@pytest.mark.ranks
def test_the_arm_of_fine_grained_offload_computes_the_same(figures: dict[str, Any]) -> None:
    engine = run_ranks(run_engine_arm, 1, init_group=False)[0]
    losses = {row["num_tokens"]: row["loss"] for row in figures["activations"]["rows"] if row["arm"] == "none"}
    assert {row["num_tokens"]: row["loss"] for row in engine["rows"]} == losses
    assert {row["arm"] for row in engine["rows"]} == {"fine-grained offload (TransformerEngine)"}
    assert engine["ends"] == 2 * (2 + 1)  # every step of both lengths, warm-up or timed


def test_a_machine_without_the_host_memory_does_not_run_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench.activation import activation_arms, gpu_activations

    monkeypatch.setattr(sys, "argv", QUICK)
    settings, _ = gpu_activations.parse()
    arms = {arm.name: arm for arm in activation_arms.arms_of(settings, 64, 0.01)}
    assert activation_arms.lacks_host_memory(arms["save_on_cpu"], 64, settings) is None
    text = activation_arms.lacks_host_memory(arms["save_on_cpu"], 1 << 40, settings)
    assert text is not None
    assert "GB of host memory" in text
    assert activation_arms.lacks_host_memory(arms["priced"], 1 << 40, settings) is None


def test_arms_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench.activation import activation_arms, gpu_activations

    monkeypatch.setattr(sys, "argv", [*QUICK, "--arms", "priced", "full recompute"])
    settings, _ = gpu_activations.parse()
    arms = gpu_activations.wanted(activation_arms.arms_of(settings, 64, 0.01), settings)
    assert [arm.name for arm in arms] == ["full recompute", "priced"]


@pytest.mark.parametrize("words", [(), ("--host-bound",)])
def test_defaults_fit_nine_minutes(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench takes hours at the rates of plans, on a GPU of 80 GB."""
    from scripts.bench.activation import activation_arms, gpu_activations

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    minutes = {}
    for more in ((), ("--all",)):
        monkeypatch.setattr(sys, "argv", ["script", "--activation-gb", "70", *words, *more])
        settings, _ = gpu_activations.parse()
        minutes[more] = activation_arms.predicted_seconds(settings) / 60
        names = {arm.name for arm in gpu_activations.wanted(activation_arms.arms_of(settings, 65536, 64.0), settings)}
        assert names >= set(activation_arms.MAIN_ARMS)
        assert settings.with_sweep == (more == ("--all",) and not words)
    assert 2 < minutes[()] < 9
    assert minutes[("--all",)] > 60


@pytest.mark.full
@pytest.mark.ranks
def test_calibration_makes_a_cost_file(figures: dict[str, Any]) -> None:
    calibration = figures["calibrate"]
    assert all(speed > 0 for speed in calibration["link_gb_per_second"].values())
    shared = calibration["shared_link"]
    assert shared["num_processes"] == 2
    assert shared["gpus_per_link"] in (1, 2)
    assert min(*shared["alone"], *shared["together"]) > 0
    assert [row["num_tokens"] for row in calibration["layer"]] == [64, 128, 256]
    assert figures["cost"].forward.a > 0
    assert figures["cost"].backward.b > 0


@pytest.mark.full
@pytest.mark.ranks
def test_arms_of_memory_plans_learn_the_same(figures: dict[str, Any]) -> None:
    results = figures["memory plan"]
    assert [row["arm"] for row in results["rows"]] == ["default", "expandable segments", "buffers", "plan"]
    assert len({row["loss"] for row in results["rows"]}) == 1
    assert 0 < results["buffer"] < results["bound"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_the_message_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"scripts.bench.activation.{name}").main()
    assert end.value.code == 2
    assert "--device cpu --quick" in capsys.readouterr().err


def test_recomputing_arms_keep_as_many_layers_whole_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of device memory are all free memory, and the memory that alpha 0 needs."""
    from scripts.bench.activation import activation_arms, gpu_activations

    monkeypatch.setattr(sys, "argv", ["script", "--device", "cpu", "--activation-gb", "30", "--all"])
    settings, _ = gpu_activations.parse()
    arms = activation_arms.arms_of(settings, 16384, 100.0)
    whole = {arm.name: arm.whole_layers(settings.shape.num_layers) for arm in arms}
    assert whole["none"] == 8
    ours = {whole["alpha 0"], whole["memo"], whole["priced"], whole["priced, no memory to spare"]} - {8}
    assert len(ours) > 1
    for base in ("full recompute", "keep attention output"):
        assert whole[base] == whole["priced"]
        others = {number for name, number in whole.items() if name.startswith(base) and "inputs" not in name}
        assert others == ours
    kept = {arm.name: arm for arm in activation_arms.arms_of(settings, 16384, 100.0, kept_whole=0)}
    assert kept["full recompute"].kept_whole == kept["keep attention output"].plan.resident_layers == 0
