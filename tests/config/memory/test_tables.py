"""Parameters of n-gram memories, and the host memory of tables and their caches."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.config.memory.tables import (
    EmbeddingConfig,
    HostTables,
    NgramConfig,
    TablesConfig,
    check_host_room,
    memories_of_stages,
)
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import RowTable

HOST = HostTables(CacheSettings(200), 0.1)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_bytes_on_the_host_are_those_of_the_arrays(num_ranks: int) -> None:
    dim = 8
    table = RowTable.random(range(-(-1000 // num_ranks)), dim, 1.0, 0)
    cache = RowCache(HOST.cache, 1000, dim)
    arrays = [one for owner in (table, cache) for one in arrays_of(owner)]
    assert HOST.num_bytes(1000, dim, num_ranks) == sum(one.nbytes for one in arrays)


def arrays_of(owner: RowTable | RowCache) -> list[np.ndarray]:
    names = owner.__slots__ if isinstance(owner, RowTable) else vars(owner)
    return [value for name in names if isinstance(value := getattr(owner, name), np.ndarray)]


def test_bounds_are_those_of_the_flags_after_the_first_steps() -> None:
    host = HostTables(CacheSettings(20, "lfu", 3, 5), 0.1, fresh_steps=10)
    assert host.cache_in(9) == CacheSettings(20, "lfu")
    assert host.cache_in(10) == host.cache


def test_a_table_is_most_of_a_memory() -> None:
    config = NgramConfig((2, 15), GramRule((2, 3), 4, 1 << 24), 64, 0)
    assert config.num_parameters(2048) == (1 << 24) * 64 + 2 * 2048 * 8 * 64
    assert config.num_parameters(0) == 1 << 30


def test_a_table_on_the_host_is_no_parameter() -> None:
    config = NgramConfig((2, 15), GramRule((2, 3), 4, 1 << 24), 64, 0, HostTables(CacheSettings(0), 0.1))
    assert config.num_parameters(2048) == 2 * 2048 * 8 * 64


def test_memories_belong_to_the_stages_of_their_layers() -> None:
    assert memories_of_stages((2, 4, 5), [8]) == [3]
    assert memories_of_stages((2, 4, 5), [1, 3, 4]) == [0, 2, 1]


def test_the_fullest_stage_has_its_memories_and_the_first_one_the_embedding() -> None:
    rule = GramRule((2,), 1, 1000)
    device, host = (NgramConfig((2, 4, 5), rule, 8, 0, place) for place in (None, HOST))
    table, embedding = HOST.num_bytes(1000, 8, 3), EmbeddingConfig(HOST, 500, 16)
    vocabulary = HOST.num_bytes(500, 16, 3)
    assert TablesConfig(device).host_bytes([1, 3, 4], 3) == 0
    assert TablesConfig(host).host_bytes([1, 3, 4], 3) == 2 * table
    assert TablesConfig(device, embedding).host_bytes([1, 3, 4], 3) == vocabulary
    assert TablesConfig(host, embedding).host_bytes([8], 3) == 3 * table + vocabulary


def test_too_little_host_memory() -> None:
    check_host_room(2e9, 2e9, "use more ranks")
    with pytest.raises(
        ValueError, match=r"caches take 2\.001 GB of each process's host memory, but there are 2 GB: use more ranks"
    ):
        check_host_room(2_000_000_001, 2e9, "use more ranks")
