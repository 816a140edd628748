"""``--state-policy``: resolved values, and refusals before anything is built."""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.states import NvmeConfig, StateConfig
from bytescale_ext.plan.memory.model_states import num_parameters
from bytescale_ext.plan.states.pages import MEBIBYTE, NUM_GRADIENT_SLOTS
from bytescale_ext.plan.states.tiers import least_host_bytes
from megatron.bytescale import features
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features.states import flags as states
from megatron.bytescale.features.states.flags import REFUSALS
from megatron.bytescale.features.tables import flags as host_tables
from tests.bytescale.features.activations.test_flags import SHAPE, parsed

PAGED = ("--state-policy", "paged")
LATE = (*PAGED, "--state-update-steps", "1")
HOSTED: dict[str, Any] = {
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    "gradient_accumulation_fusion": False,
}
OPTIMIZER: dict[str, Any] = {
    "use_distributed_optimizer": False, "exit_signal": signal.SIGTERM, "async_save": False, **HOSTED,
}  # fmt: skip


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "free_host_bytes", lambda: 10**12)
    monkeypatch.setattr(states, "free_disk_bytes", lambda folder: 10**12)
    monkeypatch.setattr("bytescale_ext.states.disks.file_system_of", lambda folder: "ext4")


def config_of(*words: str, **settings: Any) -> StateConfig:
    args = parsed(*words, **{**OPTIMIZER, **settings})
    features.check(args)
    return resolve(args).get(StateConfig)


def least_gb(*words: str, **settings: Any) -> float:
    """Return the smallest host memory that works, from the refusal of less memory."""
    with pytest.raises(ValueError, match="raise --state-host-gb") as caught:
        config_of(*PAGED, "--state-host-gb", "0.01", *words, **settings)
    found = re.search(r"take ([\d.]+) GB", str(caught.value))
    assert found
    return float(found[1])


def test_pages_and_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "free_host_bytes", lambda: 8_000_000_000)
    assert config_of(*PAGED) == StateConfig(4 * MEBIBYTE, 8e9)
    assert config_of(*PAGED, "--state-host-gb", "6", "--state-page-mb", "0.5") == StateConfig(MEBIBYTE // 2, 6e9)
    assert config_of(*PAGED, "--state-host-gb", "9").host_bytes == 8e9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"there are 4 GB"):
        config_of(*PAGED, tensor_model_parallel_size=1, num_layers=40)


def test_the_refusal_names_the_least_that_works() -> None:
    least = least_gb()
    assert least == pytest.approx(12 * num_parameters(SHAPE) / 1e9, rel=0.05)
    assert config_of(*PAGED, "--state-host-gb", str(least)).host_bytes == least * 1e9
    with pytest.raises(ValueError, match="raise --state-host-gb"):
        config_of(*PAGED, "--state-host-gb", str(least - 0.001))


def test_what_a_process_holds_follows_the_layout() -> None:
    whole = least_gb()
    in_float32 = least_gb(params_dtype=torch.float32)
    assert in_float32 == pytest.approx(whole * 8 / 12, rel=0.05)
    shared = least_gb(use_distributed_optimizer=True, data_parallel_size=4, world_size=4)
    assert shared == pytest.approx(whole / 4, rel=0.15)
    staged = least_gb(pipeline_model_parallel_size=2, world_size=2)
    assert whole / 2 < staged < 0.6 * whole
    tied = least_gb(untie_embeddings_and_output_weights=False)
    assert whole - tied == pytest.approx(12 * SHAPE.vocab * SHAPE.hidden / 1e9, rel=0.1)


def test_late_updates_take_host_memory_too() -> None:
    assert config_of(*PAGED).update_steps == 0
    assert config_of(*LATE).update_steps == 1
    assert config_of(*PAGED, "--state-update-steps", "3").update_steps == 3
    exact = least_gb()
    for steps, each in (("1", 6), ("2", 10)):
        late = least_gb("--state-update-steps", steps)
        assert late / exact == pytest.approx(1 + each / 12, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--state-host-gb", "1"), "--state-host-gb needs --state-policy paged"),
        ((*PAGED, "--state-host-gb", "-1"), "--state-host-gb -1 is not an amount of memory"),
        ((*PAGED, "--state-page-mb", "0"), "--state-page-mb 0 must be at least 0.00390625"),
        ((*PAGED, "--state-nvme-gb", "1"), "--state-nvme-gb needs --state-nvme"),
        ((*PAGED, "--state-nvme", "no/such"), "--state-nvme no/such is not a folder"),
        (("--state-update-steps", "1"), "--state-update-steps needs --state-policy paged"),
        ((*PAGED, "--state-update-steps", "-1"), "--state-update-steps -1 must be at least 0"),
        ((*PAGED, "--state-nvme", ".", "--state-page-mb", "0.01"), "--state-page-mb 0.01 must be a multiple of 1/256"),
    ],
)
def test_bad_values(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        config_of(*words)


def nvme_of(*words: str, **settings: Any) -> NvmeConfig:
    nvme = config_of(*PAGED, *words, **settings).nvme
    assert nvme is not None
    return nvme


def test_a_disk_and_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--state-nvme", str(tmp_path))
    monkeypatch.setattr(states, "free_disk_bytes", lambda folder: 3 * 10**11 * (folder == tmp_path))
    assert nvme_of(*words) == NvmeConfig(tmp_path, 3e11, 0, signal.SIGTERM)
    assert nvme_of(*words, "--state-nvme-gb", "200").num_bytes == 2e11
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert nvme_of(*words, exit_signal=signal.SIGUSR2) == NvmeConfig(tmp_path, 1.5e11, 0, signal.SIGUSR2)


def test_a_run_with_a_disk_ends_on_a_signal(tmp_path: Path) -> None:
    args = parsed(*PAGED, "--state-nvme", str(tmp_path), **OPTIMIZER)
    features.check(args)
    assert args.exit_signal_handler
    without = parsed(*PAGED, **OPTIMIZER, exit_signal_handler=False)
    features.check(without)
    assert not without.exit_signal_handler


def test_a_disk_needs_little_host_memory_and_two_versions_of_space(tmp_path: Path) -> None:
    words = (*PAGED, "--state-nvme", str(tmp_path), "--state-host-gb")
    least = least_host_bytes(4 * MEBIBYTE, True) / 1e9
    assert config_of(*words, f"{least}").host_bytes == pytest.approx(least * 1e9)
    with pytest.raises(
        ValueError, match=r"take 0\.068 GB of host memory .*: raise --state-host-gb to at least that, use"
    ):
        config_of(*words, "0.06")
    with pytest.raises(ValueError, match="raise --state-nvme-gb to at least that") as caught:
        config_of(*words, "1", "--state-nvme-gb", "1")
    found = re.search(r"take ([\d.]+) GB of", str(caught.value))
    assert found
    assert float(found[1]) == pytest.approx(24 * num_parameters(SHAPE) / 1e9, rel=0.05)
    config_of(*words, "1", "--state-nvme-gb", found[1])
    config_of(*words, "900", "--state-nvme-gb", "1")  # all fit in host memory


def test_async_saves_are_refused_with_a_disk_alone(tmp_path: Path) -> None:
    off = {"states": "--state-policy"}
    refuse_conflicts(parsed(*PAGED, **{**OPTIMIZER, "async_save": True}), off, REFUSALS)
    with_disk = parsed(*PAGED, "--state-nvme", str(tmp_path), **{**OPTIMIZER, "async_save": True})
    with pytest.raises(ValueError, match="does not work with --async-save: remove it, or --state-nvme"):
        refuse_conflicts(with_disk, off, REFUSALS)


SETTINGS: dict[str, Any] = {"--optimizer": "sgd"}


LATER = [row for row in REFUSALS[:-1] if row.flag.endswith(" with host gradients")]
ALWAYS = [row for row in REFUSALS[:-1] if row.flag != "--async-save" and row not in LATER]


@pytest.mark.parametrize("row", ALWAYS, ids=lambda row: row.flag)
def test_settings_that_do_not_go_with_pages(row: Any) -> None:
    dest = row.flag.removeprefix("--").replace("-", "_")
    args = parsed(*PAGED, **OPTIMIZER, **{dest: SETTINGS.get(row.flag, True)})
    with pytest.raises(ValueError, match=f"^--state-policy does not work with {row.flag}: "):
        refuse_conflicts(args, {"states": "--state-policy"}, REFUSALS)
    refuse_conflicts(parsed(*PAGED, **OPTIMIZER), {"states": "--state-policy"}, REFUSALS)


@pytest.mark.parametrize("row", LATER, ids=lambda row: row.flag)
def test_settings_that_need_gradients_on_the_device(row: Any) -> None:
    """These settings are refused from stage 2 on, with a remedy."""
    dest = row.flag.split()[0].removeprefix("--").replace("-", "_")
    off = {"states": "--state-policy"}
    for stage in ("2", "3"):
        args = parsed(*PAGED, "--state-stage", stage, **{**OPTIMIZER, dest: True})
        with pytest.raises(ValueError, match=f"^--state-policy does not work with {row.flag}: remove it"):
            refuse_conflicts(args, off, LATER)
        refuse_conflicts(parsed(*PAGED, "--state-stage", stage, **OPTIMIZER), off, LATER)
    refuse_conflicts(parsed(*PAGED, **{**OPTIMIZER, dest: True}), off, LATER)


def test_stages_and_their_host_memory() -> None:
    assert (config_of(*PAGED).stage, config_of(*PAGED).window_layers) == (1, 2)
    third = config_of(*PAGED, "--state-stage", "3", "--state-window-layers", "4")
    assert (third.stage, third.window_layers) == (3, 4)
    first, second, third_gb = (least_gb("--state-stage", stage) for stage in "123")
    parameters = num_parameters(SHAPE) / 1e9
    slots = NUM_GRADIENT_SLOTS * 4 * MEBIBYTE / 1e9
    assert second - first == pytest.approx(4 * parameters + slots, abs=0.002)
    assert third_gb - second == pytest.approx(2 * parameters, abs=0.002)


def test_kernels_of_other_packages_go_with_host_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine and Apex may be installed, except for Apex's sum of weight gradients on the device."""
    find = importlib.util.find_spec
    installed = ("transformer_engine", "apex")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: find("torch" if name in installed else name, *of)
    )
    off = {"states": "--state-policy"}
    fused = {**OPTIMIZER, "gradient_accumulation_fusion": True}
    refuse_conflicts(parsed(*PAGED, "--state-stage", "2", **OPTIMIZER), off, REFUSALS)
    refuse_conflicts(parsed(*PAGED, **fused), off, REFUSALS)
    with pytest.raises(ValueError, match="fusion with host gradients: add --no-gradient-accumulation-fusion"):
        refuse_conflicts(parsed(*PAGED, "--state-stage", "2", **fused), off, REFUSALS)
