"""Adam with pages on a disk is bitwise equal to torch's Adam, and survives a full disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.states import NvmeConfig, StateConfig
from bytescale_ext.plan.states.tiers import least_host_bytes
from bytescale_ext.states import page_file
from bytescale_ext.states.adam import PagedAdam
from bytescale_ext.states.page_file import PagesDamaged, read_record
from bytescale_ext.states.tiered import TieredMemory
from tests.sample import sampled
from tests.states.test_adam import Paged, Resident, assert_equal, load

SIZES = ((50, 30), (1,), (400, 70), (20, 20), (9,), (3300,))
PAGE_BYTES = 4096
STEPS = 20
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def larger_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.states.test_adam.SHAPES", SIZES)


class Tiered(Paged):
    """Torch's Adam with ``num_host`` pages of states in host memory, and the others on a disk."""

    def __init__(self, dtype: torch.dtype, folder: Path, num_host_pages: int) -> None:
        host_bytes = least_host_bytes(PAGE_BYTES, dtype is not torch.float32) + num_host_pages * PAGE_BYTES
        super().__init__(dtype, config=StateConfig(PAGE_BYTES, host_bytes, NvmeConfig(folder, 1e9, rank=0)))
        self.tiers = tiers_of(self.adam)

    def run(self, steps: Sequence[int]) -> None:
        for number in steps:
            self.step(number)


def tiers_of(adam: PagedAdam) -> TieredMemory:
    assert adam.tiers is not None
    return adam.tiers


def resident_after(dtype: torch.dtype, steps: Sequence[int]) -> Resident:
    run = Resident(dtype)
    for number in steps:
        run.step(number)
    return run


def saved(run: Tiered) -> Tiered:
    """Load the states into the optimizer, as for a save."""
    run.optimizer.state_dict()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("num_host_pages", sampled([0, 17], [17]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_equal_those_of_torch(dtype: torch.dtype, num_host_pages: int, tmp_path: Path) -> None:
    tiered, resident = Tiered(dtype, tmp_path, num_host_pages), Resident(dtype)
    num_pages = len(tiered.adam.table.pages)
    assert len(tiered.adam.on_disk) == num_pages or num_host_pages
    assert len(tiered.adam.on_disk) > num_pages // 4
    for number in range(STEPS):
        tiered.step(number)
        resident.step(number)
        assert all(map(torch.equal, tiered.model, resident.model))
        if number in (0, 7, STEPS - 1):
            assert_equal(saved(tiered), resident)
    assert tiered.adam.host_bytes <= least_host_bytes(PAGE_BYTES, True) + num_host_pages * PAGE_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_states_go_from_resident_to_tiered_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = Resident(dtype)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    runs = [Resident(dtype), Tiered(dtype, folders[0], 9), Tiered(dtype, folders[1], 25), Resident(dtype)]
    number = 0
    for before, run in zip([None, *runs], runs, strict=False):
        if isinstance(run, Tiered):
            run.step(99)  # pages that were read ahead must be dropped
            run.optimizer.state_dict()
        if before is not None:
            load(run, before)
        for _ in range(3):
            run.step(number)
            whole.step(number)
            number += 1
        assert_equal(saved(run) if isinstance(run, Tiered) else run, whole)


def test_each_saved_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    """Otherwise Megatron's writer would copy all states in host memory."""
    run = Tiered(torch.bfloat16, tmp_path, 9)
    run.step(0)
    run.optimizer.state_dict()
    for one in run.main:
        for tensor in (one, run.optimizer.state[one]["exp_avg"], run.optimizer.state[one]["exp_avg_sq"]):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


def test_pages_are_read_ahead_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Tiered(torch.float32, tmp_path, 0)
    first = sorted(run.adam.on_disk)[:4]
    read: list[int] = []
    original = page_file.PageFile.read
    monkeypatch.setattr(page_file.PageFile, "read", lambda *args: read.append(args[3]) or original(*args))
    run.run(range(2))
    run.tiers._finish(reads=True)
    assert sorted(read[-8:]) == sorted(2 * first)  # two planes of the first four pages, after the step
    count = len(read)
    run.step(2)
    run.tiers._finish(reads=True)
    assert len(read) == count + 2 * len(run.adam.on_disk)  # these pages are not read again in the step


@pytest.mark.slow
@pytest.mark.parametrize("when", ["first write", "middle", "record"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_disk_costs_no_step(
    dtype: torch.dtype, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step reports the reason, and ends with the unwritten pages in host memory. A save then has all states."""
    run = Tiered(dtype, tmp_path, 9)
    said: list[str] = []
    run.tiers.report_failure = said.append
    run.run(range(3))
    allowed = {"first write": 0, "middle": 31, "record": 10**9}[when]
    lock = threading.Lock()
    written, write = [0], os.pwritev

    def pwritev(*args: Any) -> int:
        with lock:
            written[0] += 1
            if written[0] > allowed:
                raise OSError(28, "No space left on device")
        return write(*args)

    def no_record(*_: object) -> int:
        raise OSError(28, "No space left on device")

    run.tiers._finish(reads=True)
    with monkeypatch.context() as full:
        full.setattr(os, "pwritev", pwritev)
        if when == "record":
            full.setattr(os, "pwrite", no_record)
        run.run(range(3, 6))
        assert_equal(saved(run), resident_after(dtype, range(6)))
    assert len(said) == 1
    assert said[0].endswith("failed: No space left on device; they stay in host memory")
    record = read_record(run.tiers.file.path)
    assert record is not None
    assert record.step == 3  # the complete version stays complete
    run.run(range(6, 8))
    assert_equal(saved(run), resident_after(dtype, range(8)))


def test_a_damaged_page_ends_the_run(tmp_path: Path) -> None:
    run = Tiered(torch.bfloat16, tmp_path, 0)
    run.run(range(2))
    run.tiers._finish(reads=True)
    layout = run.tiers.file.layout
    with run.tiers.file.path.open("r+b") as file:
        file.seek(layout.offset(run.tiers._version, 2, 11) + 100)
        file.write(b"damage")
    with pytest.raises(PagesDamaged, match="page 11 of plane 2 in "):
        run.run(range(2, 4))
