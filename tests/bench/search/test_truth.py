"""Choice of strategies to train, their rounds, and errors of predictions, without a training."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.plan.search.costed import CostedStrategy
from bytescale_ext.plan.search.explore import ScoredStrategy
from bytescale_ext.plan.search.space import Space, with_budgets
from bytescale_ext.plan.search.strategy import FULL, KEEP, PRICED, Strategy
from bytescale_ext.plan.search.task import DoesNotFit
from megatron.bytescale.cli.search.script import ScriptedRun
from megatron.bytescale.cli.search.verify import Verified
from scripts.bench.search import truth
from scripts.bench.search.truth import different, executed, fastest_of_kinds, in_rounds, kind, spread, summary
from scripts.cluster.emulate import Ended
from scripts.cluster.ranks import Launch
from scripts.cluster.topology import Topology
from tests.plan.search.tasks import STEPS, random_task, small_task

ROWS = [
    Verified(1, "tp 1", 1.0, 2.0, 1.25, 2.5),
    Verified(2, "tp 2", 1.1, 2.0, failure="no --lr"),
    Verified(3, "tp 4", 1.2, 4.0, 1.0, 5.0),
]


def test_kinds_are_from_fast_to_slow_and_the_fastest_is_first() -> None:
    found = fastest_of_kinds(random_task(0), Space(stages=(1,), activations=(KEEP, FULL)))
    assert len({kind(one.strategy) for one in found}) == len(found) > 5
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    chosen = spread(found, 5)
    assert len(chosen) == 5
    assert (chosen[0], chosen[-1]) == (found[0], found[-1])
    assert spread(found[:3], 5) == found[:3]


def test_what_failed_does_not_count() -> None:
    found = summary(ROWS)
    assert found["strategies"] == 2
    assert found["choice_over_best"] == 1.25
    assert found["rank_correlation"] == pytest.approx(-1.0)
    assert found["worst_memory_error"] == pytest.approx(0.2)
    assert found["median_time_error"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no strategy ran"):
        summary(ROWS[1:2])


def test_without_the_choice_there_is_no_ratio() -> None:
    assert summary(ROWS[2:])["choice_over_best"] is None


def budgets(strategy: Strategy) -> Iterator[Strategy]:
    """Device memory decreases as long as the policy fits. The host has some memory."""
    for device_gb in np.geomspace(1.0, 1e-4, 100).tolist():
        one = replace(strategy, device_gb=device_gb, host_gb=1.0)
        with contextlib.suppress(DoesNotFit):
            CostedStrategy.of(small_task(), one)
            yield one


@pytest.mark.slow
def test_a_policy_without_work_is_no_other_strategy() -> None:
    task = small_task()
    plain = Strategy(1, (6,), 1024, shares_optimizer=True)
    idle = replace(plain, activations=PRICED, device_gb=1e3)
    busy = next(one for one in budgets(idle) if not CostedStrategy.of(task, one).forecast.whole.keeps_all)  # type: ignore[union-attr]
    wide = replace(plain, tokens_per_rank=2048)
    sliced = with_budgets(task, replace(plain, stage_layers=(3, 3), chooses_slices=True))
    keys = [executed(task, one) for one in (plain, idle, busy, wide, sliced)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    scored = [ScoredStrategy(one, (), task) for one in (plain, idle, wide, busy, idle)]
    assert [one.strategy for one in different(task, scored)] == [plain, wide, busy]
    assert len(keys[4][4]) == len(STEPS)  # type: ignore[arg-type]


def test_rounds_go_back_and_forth_and_give_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []

    def verified(search: object, task: object, scored: Sequence[str], train: None) -> list[Verified]:
        orders.append(list(scored))
        seconds = {"a": 1.0 + len(orders) / 10, "b": 2.0, "c": 3.0}
        return [Verified(place, one, 1.0, 2.0, seconds[one], 2.0) for place, one in enumerate(scored, 1)]

    monkeypatch.setattr(truth, "verified", verified)
    trained = truth.train_all(argparse.Namespace(), small_task(), ["a", "b", "c"], 3)  # type: ignore[list-item]
    assert orders == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]
    rows, spreads = in_rounds(trained)
    assert [(row.number, row.strategy, row.seconds) for row in rows] == [(1, "a", 1.2), (2, "b", 2.0), (3, "c", 3.0)]
    assert spreads == {"median_spread": 0.0, "worst_spread": pytest.approx(0.1 / 1.2)}
    failed = [[ROWS[0]], [ROWS[1]]]
    assert in_rounds(failed) == ([ROWS[1]], {})


def test_a_training_on_a_cluster_gives_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    code = 0

    def run(topology: Topology, launch: Launch) -> Ended:
        launches.append(launch)
        launch.log(0).write_text("ValueError: --lr is missing\n")
        return Ended(code, None)

    monkeypatch.setattr(truth, "run", run)
    lines = [{"step_seconds": seconds, "device_peak_megabytes": 250.0} for seconds in (9.0, 8.0, 1.0, 3.0, 2.0, 9.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train = truth.on_cluster(Topology(1, 8))
    of = ScriptedRun(["--num-layers", "2"], ["--hybrid-data-parallel"], 4096, 16, None)
    row = train(of, ["--lr", "1"], tmp_path, ROWS[0])
    assert (row.seconds, row.gb) == (2.0, 0.25)
    assert launches[0].command[0].endswith("pretrain_gpt_hdp.py")
    assert launches[0].command[1:3] == ("--num-layers", "2")
    assert launches[0].command[-2:] == ("--lr", "1")
    code = 1
    assert "--lr is missing" in train(of, [], tmp_path, ROWS[0]).failure
