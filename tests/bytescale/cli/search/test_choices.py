from __future__ import annotations

from dataclasses import replace

from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import BLOCK, FULL, PRICED, Strategy
from megatron.bytescale.cli.search.choices import CHOICES, DECIDED, VALUES
from tests.plan.search.tasks import small_task


def test_every_flag_of_a_strategy_is_decided() -> None:
    strategies = [
        Strategy(2, (3, 2), 64, chooses_slices=True, shares_optimizer=True, loss_tokens=8, device_gb=1.0, host_gb=1.0),
        Strategy(1, (2, 2), 64, chunks=2, activations=FULL, expert_parallel=2),
        Strategy(1, (2,), 64, activations=PRICED, device_gb=1.0),
    ]
    flags = {word for one in strategies for word in one.flags() if word.startswith("--")}
    assert flags <= DECIDED
    assert CHOICES.keys() <= DECIDED


def test_values_differ_where_strategies_do() -> None:
    one = Strategy(1, (2, 2), 64)
    other = Strategy(
        2, (3, 1, 1), 128, shares_optimizer=True, chooses_slices=True, activations=PRICED, loss_tokens=8,
        expert_parallel=2,
    )  # fmt: skip
    for flag, value in CHOICES.items():
        if flag not in ("--num-virtual-stages-per-pipeline-rank", "--recompute-granularity", "--recompute-method"):
            assert value(one) != value(other), flag
    assert CHOICES["--num-virtual-stages-per-pipeline-rank"](Strategy(1, (2, 2), 64, chunks=2)) == "2"
    full, block = Strategy(1, (2,), 64, activations=FULL), Strategy(1, (2,), 64, activations=BLOCK, recomputed_layers=1)
    assert [CHOICES["--recompute-granularity"](one) for one in (full, block)] == ["full", "full"]
    assert [CHOICES["--recompute-method"](one) for one in (full, block, other)] == ["uniform", "block", "none"]


def test_values_are_those_of_all_strategies() -> None:
    """Flags without a list of values have one value in each branch."""
    found: dict[str, set[str]] = {flag: set() for flag in CHOICES}
    task = replace(small_task(memory_bytes=3e6), context=8192)
    for branch in Space().branches(task):
        strategies = list(branch.strategies)
        for flag, value in CHOICES.items():
            of_branch = {value(one) for one in strategies}
            found[flag] |= of_branch
            assert flag in VALUES or of_branch <= {value(branch.mesh)}, flag
    for flag, values in VALUES.items():
        assert found[flag] <= set(values), flag
    assert found["--chunked-cross-entropy"] == {"off", "4096"}
    assert found["--recompute-method"] == {"none", "uniform"}
