"""Features with threads of their own run together: with random delays every step has its documents, on every rank."""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.experts.test_placement import EP2, MOE, SLOTS
from tests.e2e.states.test_ngram import NGRAM
from tests.e2e.states.test_paged import GRADIENTS, HOST_GB_OF_STAGE_3, PAGED
from tests.e2e.training import HDP, MODEL, TRAIN, plan_in_process, record_steps, train_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.full]

STEPS, SAMPLES = 40, 8
TABLES: Final = ("ngram", "embedding")
FEATURES: Final = {
    "planner process": [],
    "ngram": [*NGRAM, "--ngram-layers", 2],
    "embedding": [],
    "disk": [*PAGED, "--state-host-gb", HOST_GB_OF_STAGE_3],
    "late updates": [*PAGED, "--state-update-steps", 1],
    "gradients": [*PAGED, *GRADIENTS],
    "slots": [*MOE, *EP2, *SLOTS],
}
REFUSED: Final = ({"late updates", "gradients"}, {"slots", "gradients"}, {"slots", "late updates"})
CASES = [
    case
    for size in (2, 3)
    for case in itertools.combinations(FEATURES, size)
    if not any(pair <= set(case) for pair in REFUSED)
]


@pytest.mark.parametrize("names", [" + ".join(case) for case in CASES])
def test_pairs_and_triples(names: str, corpus: Path, tmp_path: Path) -> None:
    case = names.split(" + ")
    flags = [word for name in case for word in FEATURES[name]]
    if tables := [name for name in case if name in TABLES]:
        flags += ["--host-tables", *tables]
    if "disk" in case:
        flags += ["--state-nvme", tmp_path]
    check(2, corpus, [*HDP, "--hdp-tokens-per-rank", 128, *flags], "planner process" in case)


def test_two_tables_in_pipelines_of_slices(corpus: Path) -> None:
    slices = ["--pipeline-model-parallel-size", 2, "--seq1f1b-slices", 2, "--hdp-tokens-per-rank", 128]
    check(4, corpus, [*HDP, *NGRAM, "--host-tables", *TABLES, "--num-layers", 4, *slices], False)


def check(num_ranks: int, corpus: Path, flags: list[object], in_process: bool) -> None:
    """Train with delays, and compare the documents of each step with the data set's order."""
    given = ["--data-path", corpus, "--train-iters", STEPS, "--ckpt-format", "torch_dist"]
    outcomes = train_ranks(num_ranks, *MODEL, *TRAIN, *given, *flags, entry=partial(train_with_delays, in_process))
    for outcome in outcomes:
        assert len(outcome.records()) == STEPS
        samples = [number for record in outcome.records() for number in record["sample_ids"]]
        assert samples == list(range(STEPS * SAMPLES))


def train_with_delays(in_process: bool) -> None:
    """Entry that delays the start of each thread, each task of a pool, and each look at a later step."""
    from bytescale_ext.data.loading.loader import StepsAhead, _LocalSteps

    plan_in_process(in_process)
    draw = random.Random(time.time_ns())
    for owner, name in (
        (threading.Thread, "run"),
        (futures.thread._WorkItem, "run"),
        (StepsAhead, "peek"),
        (_LocalSteps, "step"),
    ):
        setattr(owner, name, delayed(getattr(owner, name), draw))
    record_steps()


def delayed(function: Any, draw: random.Random) -> Any:
    """Return the function with a random delay of up to 20 ms before each call."""

    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.random() * 0.02)
        return function(*args, **kwargs)

    return wait_and_call
