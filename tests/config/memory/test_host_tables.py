"""The host memory of tables and their caches."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.config.memory.host_tables import HostTables, check_host_room
from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import RowTable


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_bytes_on_the_host_are_those_of_the_arrays(num_ranks: int) -> None:
    dim, host = 8, HostTables(CacheSettings(200), 0.1)
    table = RowTable.random(range(-(-1000 // num_ranks)), dim, 1.0, 0)
    cache = RowCache(host.cache, 1000, dim)
    arrays = [one for owner in (table, cache) for one in arrays_of(owner)]
    assert host.num_bytes(1000, dim, num_ranks) == sum(one.nbytes for one in arrays)


def arrays_of(owner: RowTable | RowCache) -> list[np.ndarray]:
    names = owner.__slots__ if isinstance(owner, RowTable) else vars(owner)
    return [value for name in names if isinstance(value := getattr(owner, name), np.ndarray)]


def test_bounds_are_those_of_the_flags_after_the_first_steps() -> None:
    host = HostTables(CacheSettings(20, "lfu", 3, 5), 0.1, fresh_steps=10)
    assert host.cache_in(9) == CacheSettings(20, "lfu")
    assert host.cache_in(10) == host.cache


def test_too_little_host_memory() -> None:
    check_host_room("tables", 2e9, 2e9, "use more ranks")
    with pytest.raises(
        ValueError, match=r"tables take 2\.001 GB of each process's host memory, but there are 2 GB: use more ranks"
    ):
        check_host_room("tables", 2_000_000_001, 2e9, "use more ranks")
