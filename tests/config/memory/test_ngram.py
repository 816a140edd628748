"""The size of an n-gram memory."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.config.memory.ngram import HostTables, NgramConfig
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import RowTable


def test_a_table_is_most_of_a_memory() -> None:
    config = NgramConfig((2, 15), GramRule((2, 3), 4, 1 << 24), 64, 0)
    assert config.num_parameters(2048) == (1 << 24) * 64 + 2 * 2048 * 8 * 64
    assert config.num_parameters(0) == 1 << 30


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_bytes_on_the_host_are_those_of_the_arrays(num_ranks: int) -> None:
    rule, dim = GramRule((2,), 1, 1000), 8
    host = HostTables(CacheSettings(200), 0.1)
    table = RowTable.drawn(range(-(-1000 // num_ranks)), dim, 1.0, 0)
    cache = RowCache(host.cache, 1000, dim)
    arrays = [one for owner in (table, cache) for one in arrays_of(owner)]
    assert host.num_bytes(rule, dim, num_ranks) == sum(one.nbytes for one in arrays)


def arrays_of(owner: RowTable | RowCache) -> list[np.ndarray]:
    names = owner.__slots__ if isinstance(owner, RowTable) else vars(owner)
    return [value for name in names if isinstance(value := getattr(owner, name), np.ndarray)]


def test_a_table_on_the_host_is_no_parameter() -> None:
    rule = GramRule((2, 3), 4, 1 << 24)
    config = NgramConfig((2, 15), rule, 64, 0, HostTables(CacheSettings(0), 0.1))
    assert config.num_parameters(2048) == 2 * 2048 * 8 * 64


def test_too_little_host_memory() -> None:
    host = HostTables(CacheSettings(0), 0.1)
    host.check_fits(2e9, 2e9)
    with pytest.raises(ValueError, match=r"take 2\.001 GB of host memory, and there are 2 GB: lower --ngram-rows"):
        host.check_fits(2_000_000_001, 2e9)
