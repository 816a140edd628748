"""The size of an n-gram memory."""

from __future__ import annotations

from bytescale_ext.config.memory.host_tables import HostTables
from bytescale_ext.config.memory.ngram import NgramConfig
from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings


def test_a_table_is_most_of_a_memory() -> None:
    config = NgramConfig((2, 15), GramRule((2, 3), 4, 1 << 24), 64, 0)
    assert config.num_parameters(2048) == (1 << 24) * 64 + 2 * 2048 * 8 * 64
    assert config.num_parameters(0) == 1 << 30


def test_a_table_on_the_host_is_no_parameter() -> None:
    rule = GramRule((2, 3), 4, 1 << 24)
    config = NgramConfig((2, 15), rule, 64, 0, HostTables(CacheSettings(0), 0.1))
    assert config.num_parameters(2048) == 2 * 2048 * 8 * 64


def test_memories_are_parameters_of_their_layers_stage() -> None:
    config = NgramConfig((2, 4, 5), GramRule((2,), 1, 10), 3, 0)
    assert config.stage_parameters(1, [8]) == [3 * 36]
    assert config.stage_parameters(1, [1, 3, 4]) == [0, 2 * 36, 36]
