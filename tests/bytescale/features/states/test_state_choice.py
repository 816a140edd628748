"""``--state-policy auto``: resolved values for states and activations, and refusals."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.memory.states import ResidentStates, StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.memory.model_states import num_parameters
from bytescale_ext.plan.setup.choose import choose
from megatron.bytescale import features
from megatron.bytescale.arguments import setup as arguments
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.arguments.setup import setup_of
from megatron.bytescale.features.states import flags as states
from megatron.bytescale.features.states.flags import DeviceFlags, allowed_stages
from megatron.bytescale.features.tables import flags as host_tables
from tests.bytescale.features.activations.test_flags import SHAPE, parsed
from tests.bytescale.features.states.test_flags import OPTIMIZER

AUTO = ("--state-policy", "auto")


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_tables, arguments):
        monkeypatch.setattr(module, "free_host_bytes", lambda: 10**12)
    monkeypatch.setattr(states, "free_disk_bytes", lambda folder: 10**12)
    monkeypatch.setattr("bytescale_ext.states.disks.file_system_of", lambda folder: "ext4")


def run_of(device: float, host: float, *words: str, **settings: Any) -> RunConfig:
    budgets = ("--device-memory-gb", str(device), "--host-memory-gb", str(host))
    args = parsed(*AUTO, *budgets, *words, **{**OPTIMIZER, **settings})
    features.check(args)
    return resolve(args)


def note_of(run: RunConfig) -> str:
    found = run.find(StateConfig) or run.get(ResidentStates)
    return found.note


def test_resident_where_all_fits() -> None:
    run = run_of(80, 10)
    assert run.find(StateConfig) is None
    assert "> bytescale: states auto (the least predicted time): resident: " in note_of(run)
    assert re.search(r"what else fits: stage 1 [\d.]+ s; stage 2 [\d.]+ s", note_of(run))


def test_a_small_device_moves_states_and_names_why() -> None:
    run = run_of(6, 10)
    config = run.get(StateConfig)
    assert (config.stage, config.nvme, config.host_bytes) == (1, None, 10e9)
    assert re.search(r"\(resident takes [\d.]+ GB of device memory\): stage 1", note_of(run))


@pytest.mark.slow
def test_activations_get_what_states_leave() -> None:
    """Activations cannot use the host memory of pages, and in stage 3 parameters take a part of the link."""
    words = ("--activation-policy", "priced")
    left = run_of(80, 10, *words).get(ActivationConfig).machine
    assert (left.host_bytes, left.link_bytes_per_second) == (10e9, 55e9)
    assert left.device_bytes < 80e9
    paged = run_of(4, 6, *words)
    policy = paged.get(ActivationConfig)
    assert paged.get(StateConfig).stage == 1
    assert policy.machine.host_bytes < 6e9 - 12 * num_parameters(SHAPE)
    assert policy.machine.device_bytes == pytest.approx(4e9 - 6 * num_parameters(SHAPE))
    policy.of_stage.check_fits()
    third = run_of(0.5, 8, *words, seq_length=1024)
    policy = third.get(ActivationConfig)
    assert third.get(StateConfig).stage == 3
    assert 0.5 < policy.decision.link_share < 1
    assert policy.machine.link_bytes_per_second == policy.decision.link_share * 55e9
    assert policy.with_speeds(policy.cost, 100e9).machine.link_bytes_per_second == policy.decision.link_share * 100e9


def test_pages_on_a_disk_leave_host_memory_to_activations(tmp_path: Path) -> None:
    run = run_of(3, 1, "--state-nvme", str(tmp_path), "--state-nvme-gb", "100", "--activation-policy", "priced",
                 seq_length=2048)  # fmt: skip
    config = run.get(StateConfig)
    assert config.nvme is not None
    assert config.host_bytes < 1e9
    assert "of the pages on a disk" in note_of(run)
    ample = run_of(6, 50, "--state-nvme", str(tmp_path), "--state-nvme-gb", "100").get(StateConfig)
    assert ample.nvme is None


@pytest.mark.slow
def test_stages_make_equal_choices() -> None:
    """Every process makes the same choice, on any stage of the pipeline."""
    args = parsed(*AUTO, "--device-memory-gb", "3", "--host-memory-gb", "10", "--activation-policy", "auto",
                  **{**OPTIMIZER, "pipeline_model_parallel_size": 2, "world_size": 2})  # fmt: skip
    features.check(args)
    run = resolve(args)
    other = replace(run, process=replace(run.process, stage=1))
    assert states.resolve(states.STATES.read(args), other) == run.features["states"]
    assert choose(setup_of(args)) == run.decision


def test_costs_decide(tmp_path: Path) -> None:
    """A slow device overlaps copies that a fast device waits for. ``--cost-file`` needs no other feature."""
    shape = replace(SHAPE, num_layers=8)
    slow = cost_of_rates(shape, 1e12, 1e12, 1e12)
    write_cost(tmp_path / "slow.json", slow)
    seconds = []
    for words in ((), ("--cost-file", str(tmp_path / "slow.json"))):
        found = re.search(r"stage \d: ([\d.e+]+) s a step", note_of(run_of(6, 10, *words)))
        assert found
        seconds.append(float(found[1]))
    assert seconds[1] > 10 * seconds[0]


def allowed(args: Namespace) -> tuple[int, ...]:
    on_cuda = args.distributed_backend == "nccl"
    return allowed_stages(options_of(args, DeviceFlags), on_cuda, args.params_dtype.itemsize)


def test_stages_that_other_flags_refuse_are_not_chosen() -> None:
    overlapped = {"overlap_grad_reduce": True}
    assert allowed(parsed(*AUTO, **{**OPTIMIZER, **overlapped})) == (1,)
    assert allowed(parsed(*AUTO, **OPTIMIZER)) == (1, 2, 3)
    on_gpu = {"params_dtype": torch.float32, "distributed_backend": "nccl"}
    assert allowed(parsed(**on_gpu, **OPTIMIZER)) == (1, 3)
    with pytest.raises(ValueError, match="do not fit"):
        run_of(1.0, 20, seq_length=1024, **overlapped)
    assert run_of(1.0, 20, seq_length=1024).get(StateConfig).stage == 2


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (("--host-memory-gb", "1"), {}, "--state-policy auto needs --device-memory-gb"),
        ((), {"state_stage": 1}, "--state-policy auto chooses the value of --state-stage"),
        ((), {"state_nvme": Path()}, "--state-policy auto needs --state-nvme-gb with --state-nvme"),
        ((), {"state_update_steps": 1}, "--state-policy auto does not count the memory of --state-update-steps"),
        ((), {"num_experts": 4}, "--state-policy auto does not count the memory of --num-experts"),
        ((), {"seq1f1b_slices": "auto"}, "--state-policy auto does not count the memory of --seq1f1b-slices auto"),
    ],
)
def test_what_cannot_be_chosen(words: tuple[str, ...], settings: dict[str, Any], message: str) -> None:
    budgets = words or ("--device-memory-gb", "80", "--host-memory-gb", "10")
    with pytest.raises(ValueError, match=f"^{message}"):
        states.before_checks(states.STATES.read(parsed(*AUTO, *budgets, **{**OPTIMIZER, **settings})))


def test_a_disk_has_what_it_is_said_to_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--state-nvme", str(tmp_path), "--state-nvme-gb", "2000", "--activation-policy", "priced")
    with pytest.raises(ValueError, match=r"--state-nvme-gb 2000 for each process, and .* has 1000 GB: give at most"):
        run_of(3, 1, *words, seq_length=2048)
    dry = run_of(3, 1, *words, seq_length=2048, fake_process_group=True)
    assert dry.get(StateConfig).nvme is not None


def test_a_dry_run_is_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "free_host_bytes", lambda: 1)
    args = parsed("--state-policy", "paged", **{**OPTIMIZER, "fake_process_group": True})
    features.check(args)
    assert resolve(args).get(StateConfig).host_bytes == float("inf")
    on_disk = ("--state-nvme", "no/such", "--state-nvme-gb", "1e3", "--state-host-gb", "1")
    args = parsed("--state-policy", "paged", *on_disk, **{**OPTIMIZER, "fake_process_group": True})
    assert resolve(args).get(StateConfig).nvme is not None
