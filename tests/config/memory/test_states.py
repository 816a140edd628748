"""Budget of pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.config.memory.states import NvmeConfig, StateConfig
from bytescale_ext.plan.states.tiers import least_host_bytes

WITH_DISK = StateConfig(1024, 2e9, NvmeConfig(Path("disk"), 5e9, rank=0))


def test_the_message_names_a_budget_that_is_enough() -> None:
    config = StateConfig(1024, 2e9)
    config.check_fits(2e9)
    with pytest.raises(ValueError, match=r"take 2\.001 GB .* but there are 2 GB: raise --state-host-gb"):
        config.check_fits(2_000_000_001)


def test_the_message_names_the_space_that_is_enough() -> None:
    WITH_DISK.check_fits(2e9, 5e9)
    with pytest.raises(
        ValueError, match=r"take 5\.001 GB of disk in two versions, but there are 5 GB: raise --state-nvme"
    ):
        WITH_DISK.check_fits(2e9, 5_000_000_001)
    with pytest.raises(ValueError, match="raise --state-host-gb to at least that, use more stages"):
        WITH_DISK.check_fits(3e9)
    with pytest.raises(ValueError, match="to at least that, give a local disk by --state-nvme, use more stages"):
        replace(WITH_DISK, nvme=None).check_fits(3e9)


def test_parts_share_both_budgets() -> None:
    assert WITH_DISK.share(0.25, True).host_bytes == 0.5e9
    assert WITH_DISK.share(1e-9, True).host_bytes == least_host_bytes(1024, True)
    assert replace(WITH_DISK, nvme=None).share(0.25, True).host_bytes == 2e9
    left = WITH_DISK.without(0.5e9, 2e9)
    assert left.nvme is not None
    assert (left.host_bytes, left.nvme.num_bytes) == (1.5e9, 3e9)
    assert replace(WITH_DISK, nvme=None).without(0.5e9, 0).nvme is None
