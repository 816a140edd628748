"""The flags that fork servers prepare have the defaults of each rank."""

from __future__ import annotations

import argparse

import pytest

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def default_local_rank(rank: int, world: int) -> int:
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return int(parser.parse_args([]).local_rank)


def test_each_rank_has_its_own_local_rank() -> None:
    assert run_ranks(default_local_rank, 2, init_group=False) == [0, 1]
