"""Activation flags that cannot be: through Megatron's real parser, one clear line and exit code 2 before training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.bytescale.arguments.test_bad_input import refusal
from tests.e2e.training import MODEL, TRAIN, Outcome, train_apart

pytestmark = pytest.mark.ranks

MEMO = ("--activation-policy", "memo", "--host-memory-gb", "0.1")
CASES = {
    "swap over 1": (("--swap-fraction", "1.5", "--host-memory-gb", "0.1"), "--swap-fraction 1.5 must be a share"),
    "sum over 1": (
        (*MEMO, "--swap-fraction", "0.7", "--recompute-fraction", "0.6"),
        "--swap-fraction 0.7 and --recompute-fraction 0.6 sum to more than 1",
    ),
    "more than the machine": ((*MEMO, "--host-memory-gb", "1e6"), "GB of its free memory; give at most that"),
    "less than needed": ((*MEMO, "--host-memory-gb", "0.00001", "--num-layers", "4"), "GB of host memory"),
    "cpu offloading": (
        (*MEMO, "--cpu-offloading-num-layers", "1"),
        "--cpu-offloading-num-layers: choose one: the policy swaps",
    ),
    "fine-grained offload": (
        (*MEMO, "--fine-grained-activation-offloading", "--offload-modules", "core_attn"),
        "--activation-policy does not work with --fine-grained-activation-offloading: choose one: the policy swaps",
    ),
    "cuda graphs": (
        (*MEMO, "--cuda-graph-impl", "local"),
        "--cuda-graph-impl: remove it: a graph's memory cannot be swapped",
    ),
    "hidden dropout": ((*MEMO, "--hidden-dropout", "0.1"), "--hidden-dropout > 0: give 0"),
    "attention dropout": ((*MEMO, "--attention-dropout", "0.1"), "--attention-dropout > 0: give 0"),
    "full recompute": (
        (*MEMO, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        "--recompute-granularity: choose one: the policy recomputes",
    ),
    "selective recompute": ((*MEMO, "--recompute-granularity", "selective"), "--recompute-granularity"),
    "no plan": ((*MEMO, "--memory-plan", "missing.json"), "--memory-plan missing.json cannot be read"),
    "no device budget": (("--activation-policy", "auto", "--host-memory-gb", "0.1"), "needs --device-memory-gb"),
    "device budget": ((*MEMO, "--device-memory-gb", "0.00001"), "GB of device memory, and --device-memory-gb is 1e-05"),
}
AT_ONCE = 4


def outcomes() -> Iterator[tuple[str, Outcome]]:
    """Each case in a process of its own."""
    common = [*MODEL, *TRAIN, "--micro-batch-size", 1, "--data-path", "no-data"]
    for names in itertools.batched(CASES, AT_ONCE):
        yield from zip(names, train_apart(*([*common, *CASES[name][0]] for name in names)), strict=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        return dict(outcomes())


@pytest.mark.parametrize("name", CASES)
def test_a_clear_line_before_training(name: str, found: dict[str, Outcome]) -> None:
    assert CASES[name][1] in refusal(found[name])
