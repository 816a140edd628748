from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.bytescale.arguments.parse import add_arguments
from scripts.bench.states.ngram_loss import ARMS, DIM, EQUAL_FFN, FFN, HEADS, HIDDEN, LAST, NGRAM, ORDERS, measure


def test_arms_have_equal_parameters_that_multiply() -> None:
    of_memory = 2 * HIDDEN * len(ORDERS) * HEADS * DIM
    of_mlp = 3 * HIDDEN * (EQUAL_FFN - FFN)
    assert of_memory <= of_mlp < of_memory + 3 * HIDDEN


def test_flags_of_the_memory_are_ours() -> None:
    args, rest = add_arguments(argparse.ArgumentParser()).parse_known_args(NGRAM)
    assert (args.ngram_layers, args.ngram_orders, args.ngram_dim, rest) == ((1, 2), ORDERS, DIM, [])


def test_the_last_steps_of_each_seed_count() -> None:
    runs: list[Sequence[str]] = []

    def run(flags: Sequence[str], folder: Path) -> list[float]:
        assert folder.is_dir()
        runs.append(flags)
        seed = int(flags[flags.index("--seed") + 1])
        return [100.0] * 5 + [float(seed - 1234 + ("--ngram-layers" in flags))] * LAST

    losses = measure("data", 15, 2, run)
    assert losses == {"with memory": [1.0, 2.0], "without": [0.0, 1.0]}
    assert len(runs) == 4
    assert all(flags[flags.index("--train-iters") + 1] == "15" for flags in runs)
    assert list(ARMS) == list(losses)
