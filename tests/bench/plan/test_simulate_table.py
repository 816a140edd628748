"""Sections of docs/results/simulated.md that run alone replace their part of the page and leave the rest unchanged."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import ALL_SUMS, ONE_SLICE, Cluster, Slicing
from scripts.bench.plan.simulate_budgets import GIGABYTES, STAGES, Chosen, complete, read
from scripts.bench.plan.simulate_cases import CASES, TOKENS_PER_RANK, PlanningSpeed
from scripts.bench.plan.simulate_table import with_budgets, with_speeds

PAGE = """# Performance

## Targets

| figure | target | reached | |
|---|---|---|---|
| of another kind | at most 1 | 0.5 | met |

## Without pipelines

text

## What 1F1B allows

more

## Distance from the true optimum

end
"""
PARTS = {"activations": 20.0, "keys": 30.0, "sums": 5.0, "states": 9.0, "working": 1.0}


def chosen(over_bound: float) -> list[Chosen]:
    return [
        Chosen(case.name, stages, gigabytes, seed, over_bound + seed, (8, 1 << 20, True, ALL_SUMS), 99, PARTS, 2.0)
        for case, stages, gigabytes, seed in product(CASES, STAGES, GIGABYTES, (0, 1))
    ]


def test_sections_are_added_once_and_replaced() -> None:
    once = with_speeds(
        with_budgets(PAGE, chosen(0.5)), [PlanningSpeed(512, 15_000, "none", [0.04], [0.04, 0.05, 0.06])]
    )
    assert once.count("## Within the memory of a device") == once.count("## Planning speed") == 1
    rows = [line for line in once.splitlines() if line.startswith("| byted 2M, 512 ranks x 4 stages | ")]
    assert len(rows) == len(GIGABYTES)
    cells = "1.000 (1.500) | 8 slices, eager, all keys | 65.0 | 20.0 | 30.0 | 5.0 | 9.0 | 1.0 | 2.0 (2.0) | met |"
    assert rows[0].endswith(cells)
    assert f"**80 GB**, 2 steps: {len(CASES) * len(STAGES)} of {len(CASES) * len(STAGES)} cases meet 1.10" in once
    assert "GB of host memory" not in once
    assert "| 512 | 15,000 | none | 0.040 (0.040) | 0.050 (0.060) |" in once
    for part in PAGE.split("\n\n"):
        assert part.strip() in once
    again = with_speeds(with_budgets(once, chosen(3.0)), [PlanningSpeed(512, 15_000, "none", [0.2], [])])
    assert len(again.splitlines()) == len(once.splitlines())
    assert f"**80 GB**, 2 steps: 0 of {len(CASES) * len(STAGES)} cases meet 1.10" in again
    assert again.count("chosen within 80 GB | at most 1.1 | 3.500 | **missed** |") == len(CASES) * len(STAGES)
    assert "processor seconds, median | at most 0.1 | 0.200 | **missed** |" in again


def test_cases_that_miss_the_target_have_a_table_with_host_memory() -> None:
    missed, slicing = chosen(2.0), (3, 1 << 19, True, 1 << 18, False, 1 << 20)
    case = CASES[-1].name
    again = [replace(row, over_bound=1.0, slicing=slicing, longest=1 << 20, host_gigabytes=200, in_host=90.0)
             for row in missed if row.key[:3] == (case, 8, 80)]  # fmt: skip
    text = with_budgets(PAGE, missed + again)
    cells = "1.000 (1.000) | 3 slices, eager, keys to 512K, in host memory to 1024K, sums to 256K | 65.0 | "
    assert f"| {case} x 8 stages | {cells}" in text
    assert "**80 GB and 200 GB of host memory, for cases that lack memory**, 2 steps: 1 of 1 cases meet 1.10" in text
    assert f"{case} x 8 stages: time / pipeline bound, mean, chosen within 80 GB and 200 GB of host memory" in text
    assert complete(missed + again) == missed


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = chosen(1.0)[:3]
    file = tmp_path / "results.jsonl"
    assert read(file) == []
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    assert read(file) == rows


def test_a_step_counts_once_all_cases_have_run_it() -> None:
    rows = chosen(1.0)
    assert complete(rows) == rows
    assert {(row.gigabytes, row.seed) for row in complete(rows[1:])} == {(80, 1), (141, 0), (141, 1)}


@pytest.mark.parametrize(("count", "least"), [(2, 1.14), (3, 1.31), (4, 1.47), (8, 2.12)])
def test_no_slices_meet_the_target_if_the_longest_keys_are_sent_again(count: int, least: float) -> None:
    """The bounds in docs/results/slices.md of Byted's lengths at 2M tokens on 4 stages, first step."""
    case = next(case for case in CASES if case.name == "byted 2M, 512 ranks")
    lengths = sample_lengths(case.sampler, case.context, case.global_tokens, 0).tolist()
    cluster, stages = Cluster(case.num_ranks, TOKENS_PER_RANK), stage_costs(setup_of_cost(shipped("bytescale_7b"), 4))
    slicing = Slicing(count, max(lengths) - 1)
    bounds = [lower_bounds(lengths, cluster, stages, one).largest for one in (slicing, ONE_SLICE)]
    assert bounds[0] / bounds[1] == pytest.approx(least, abs=0.01)
