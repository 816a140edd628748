"""Costs that are learned while training change plans, not losses; they are logged, saved and restored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import read_cost
from tests.e2e.devices import on_ghosts
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train, train_ranks

pytestmark = pytest.mark.ranks

STEPS = ["--train-iters", 12, "--hdp-tokens-per-rank", 128]


def learn_at_random() -> None:
    """Entry that plans each step with other costs and speeds of ranks, equal on all ranks."""
    import numpy as np

    import pretrain_gpt_hdp
    from bytescale_ext.measure.learning import CostLearner
    from bytescale_ext.plan.cost.learned import LearnedCosts

    def at(self: CostLearner, step_index: int) -> LearnedCosts:
        random = np.random.default_rng(step_index)
        factors, speeds = random.uniform(0.2, 5.0, 5), random.choice([0.3, 0.6, 1.0], 4)
        return LearnedCosts(tuple(factors.tolist()), tuple(speeds.tolist()))

    CostLearner.at = at  # type: ignore[method-assign]
    pretrain_gpt_hdp.main()


@pytest.mark.full
def test_losses_under_random_costs_and_speeds_equal_one_process(corpus: Path) -> None:
    flags = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-tokens-per-rank", 64, "--train-iters", 6]
    unlike = train(4, *flags, entry=learn_at_random)
    one = train(1, *flags, "--hdp-tokens-per-rank", 256, "--hdp-learn-costs", "off")
    assert unlike.losses == pytest.approx(one.losses, rel=1e-4)


def tokens_so_far(outcomes: list[Outcome]) -> int:
    """Return the count of tokens in the last log line."""
    return int(re.findall(r"([\d,]+) tokens so far", outcomes[-1].text)[-1].replace(",", ""))


def test_learning_changes_no_loss_and_is_restored(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *TRAIN, "--data-path", corpus, *HDP]
    saving = ["--save", tmp_path / "save", "--save-interval", 12, "--hdp-log-dir", tmp_path / "log"]
    saving += ["--hdp-learn-costs", tmp_path / "learned.json"]
    learning = train_ranks(2, *flags, *STEPS, *saving)
    assert "costs: shipped h100, scaled; learning from step 3" in learning[0].text
    assert "hdp: costs learned: attention x" in learning[0].text
    assert learning[-1].losses == pytest.approx(train(2, *flags, *STEPS, "--hdp-learn-costs", "off").losses, rel=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["learned_costs"]["factors"] == [1.0] * 5
    assert all(factor > 0 for factor in rows[-1]["learned_costs"]["factors"])
    cost = read_cost(tmp_path / "log" / "learned_costs.json")
    assert (cost.device == "CPU", cost.forward.a > 0) == (not on_ghosts(), True)
    assert (tmp_path / "learned.json").read_bytes() == (tmp_path / "log" / "learned_costs.json").read_bytes()
    resumed = train_ranks(
        2, *flags, *STEPS, "--train-iters", 13, "--override-opt-param-scheduler", "--load", tmp_path / "save"
    )
    assert "costs and speeds of ranks continue as learned before" in resumed[0].text
    assert len(resumed[-1].losses) == 1
    assert tokens_so_far(resumed) > tokens_so_far(learning) == rows[-1]["tokens_so_far"] > 0
