from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.bytescale.arguments.parse import add_arguments
from scripts.bench.states.ngram_loss import (
    ARMS,
    DIM,
    EQUAL_FFN,
    FFN,
    HEADS,
    HIDDEN,
    LAST,
    NGRAM,
    ORDERS,
    RANKS,
    measure,
)


def test_arms_have_equal_parameters_that_multiply() -> None:
    of_memory = 2 * HIDDEN * len(ORDERS) * HEADS * DIM
    of_mlp = 3 * HIDDEN * (EQUAL_FFN - FFN)
    assert of_memory <= of_mlp < of_memory + 3 * HIDDEN


def test_flags_of_the_memory_are_ours() -> None:
    args, rest = add_arguments(argparse.ArgumentParser()).parse_known_args(NGRAM)
    assert (args.ngram_layers, args.ngram_orders, args.ngram_dim, rest) == ((1, 2), ORDERS, DIM, [])


@pytest.mark.parametrize("what", ARMS)
def test_the_last_steps_of_each_seed_count(what: str) -> None:
    runs: list[Sequence[str]] = []
    first = next(iter(ARMS[what].values()))

    def run(flags: Sequence[str], num_ranks: int, folder: Path) -> list[float]:
        assert folder.is_dir()
        assert num_ranks == RANKS[what]
        runs.append(flags)
        seed = int(flags[flags.index("--seed") + 1])
        return [100.0] * 5 + [float(seed - 1234 + (flags[:3] == first[:3]))] * LAST

    losses = measure(what, "data", 15, 2, run)
    assert losses[next(iter(ARMS[what]))] == [1.0, 2.0]
    assert len(runs) == 4
    assert all(flags[flags.index("--train-iters") + 1] == "15" for flags in runs)
    assert list(ARMS[what]) == list(losses)


def test_arms_of_staleness_differ_in_their_bounds_alone() -> None:
    exact, stale = ARMS["staleness"].values()
    parser = add_arguments(argparse.ArgumentParser())
    parsed = [vars(parser.parse_known_args(flags)[0]) for flags in (exact, stale)]
    differ = {name: (value, parsed[1][name]) for name, value in parsed[0].items() if value != parsed[1][name]}
    assert differ == {"ngram_staleness_read": (0, 10), "ngram_staleness_write": (0, 10)}
