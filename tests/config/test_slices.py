"""Settled slices: sizes, and the schedule that is made of them for each step."""

from __future__ import annotations

import pytest

from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.step.sizes import Slicing


def test_sizes_follow_from_the_slices() -> None:
    config = SliceConfig(Slicing(3), (5, 3, 2), num_stages=4, num_chunks=2)
    assert config.group_size == 6


def test_each_step_has_a_checked_schedule() -> None:
    schedule = SliceConfig(Slicing(2), (5, 3), num_stages=2).schedule(3)
    assert (schedule.num_micro_batches, schedule.num_slices, schedule.num_chunks) == (3, 2, 1)
    with pytest.raises(ValueError, match="the nearest numbers of micro-batches are 2"):
        SliceConfig(Slicing(2), (5, 3), num_stages=4, num_chunks=2).schedule(1)
