from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.bytescale.arguments.parse import add_arguments
from scripts.bench.states.lock_free_loss import ARMS, LAST, measure


def test_arms_differ_in_their_updates_alone() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    exact, *late = (vars(parser.parse_known_args(flags)[0]) for flags in ARMS.values())
    assert exact["state_update"] == "exact"
    assert [one["state_update_steps"] for one in late] == [1, 4]
    for one in late:
        differ = {name for name, value in exact.items() if value != one[name]}
        assert differ == {"state_update", "state_update_steps"}


def test_the_last_steps_of_each_seed_count() -> None:
    runs: list[Sequence[str]] = []

    def run(flags: Sequence[str], num_ranks: int, folder: Path) -> list[float]:
        assert folder.is_dir()
        assert num_ranks == 1
        runs.append(flags)
        return [100.0] * 5 + [float(len(runs))] * LAST

    assert list(measure("data", 15, 2, 1e-3, run).values()) == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert [flags[flags.index("--seed") + 1] for flags in runs] == ["1234"] * 3 + ["1235"] * 3
    assert all(flags[flags.index("--train-iters") + 1] == "15" for flags in runs)
    assert all(flags[flags.index("--lr") :][:4] == ["--lr", "0.001", "--min-lr", "0.0001"] for flags in runs)
