from __future__ import annotations

import gc
import threading

import pytest
import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.measure.peak import PeakMeter, tracked_objects
from bytescale_ext.plan.step.micro_batch import MicroBatch

MEGABYTE = 1 << 20


def floats(num_megabytes: int) -> torch.Tensor:
    """Return float32 ones that take ``megabytes``, [n]."""
    return torch.ones(num_megabytes * MEGABYTE // 4)


def measured(num_megabytes: int, host: list[torch.Tensor]) -> float:
    """Return the measured peak of a step: tensors of ``megabytes`` and half as many together, and others later."""
    gc.collect()  # otherwise garbage of other tests would count until Python collects it
    meter = PeakMeter()
    meter.begin(False, host)
    both = [floats(num_megabytes), floats(num_megabytes // 2)]
    both.clear()
    floats(num_megabytes).mul_(2.0)
    return meter.end()


@pytest.mark.full
@pytest.mark.slow
def test_what_lives_together_counts() -> None:
    before = measured(8, [])
    assert measured(16, []) - before == 12 * MEGABYTE


@pytest.mark.full
@pytest.mark.slow
def test_what_existed_counts_once_and_host_memory_does_not() -> None:
    before = measured(8, [])
    state = floats(32)
    views = [state[:7], state.view(2, -1)]
    assert measured(8, []) - before == 32 * MEGABYTE
    assert measured(8, [state]) == before
    assert len(views) == 2


@pytest.mark.slow
def test_loaded_micro_batches_are_host_memory() -> None:
    before = measured(8, [])
    ids = torch.zeros(MEGABYTE, dtype=torch.int64)
    loaded = PackedMicroBatch(ids, ids.clone(), ids.clone(), floats(4), MicroBatch(()), ("here",))
    assert measured(8, []) == before
    ids = loaded.tokens.clone()
    assert measured(8, []) - before == 8 * MEGABYTE
    assert loaded.num_rows == len(ids)


@pytest.mark.full
@pytest.mark.slow
def test_other_threads_build_tuples_meanwhile() -> None:
    """CPython raises SystemError in a thread if anything refers to a tuple that the thread has not completed."""
    is_done, errors = threading.Event(), []

    def build() -> None:
        while not is_done.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    value = torch.zeros(3)
    found = [tracked_objects(torch.Tensor) for _ in range(20)]
    is_done.set()
    thread.join()
    assert all(any(one is value for one in tensors) for tensors in found)
    assert errors == []
