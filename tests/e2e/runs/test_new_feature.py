"""A feature with one file and one row of the table trains: flag, configuration, refusal and forward step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import HDP, MODEL, TRAIN, train
from tests.sample import sampled

pytestmark = pytest.mark.ranks


def main_with_feature() -> None:
    """Entry with one more row in the table."""
    import pretrain_gpt_hdp
    from megatron.bytescale import features
    from tests.e2e.runs.scaled_loss import SCALED_LOSS

    features.FEATURES = (*features.FEATURES, SCALED_LOSS)
    pretrain_gpt_hdp.main()


KINDS: list[list[object]] = [HDP, ["--micro-batch-size", 2]]


def flags(corpus: Path, *words: object) -> list[object]:
    return [*MODEL, *TRAIN, "--train-iters", 1, "--data-path", corpus, *words]


@pytest.mark.parametrize("others", sampled(KINDS, KINDS[1:]), ids=["documents", "samples"])
def test_it_trains_with_and_without_other_features(corpus: Path, others: list[str]) -> None:
    num_ranks = 4 if others is HDP else 1
    (plain,) = train(num_ranks, *flags(corpus, *others), entry=main_with_feature).losses
    (scaled,) = train(num_ranks, *flags(corpus, *others, "--scaled-loss", 3), entry=main_with_feature).losses
    assert scaled == pytest.approx(3 * plain, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scaled-loss", 3, "--qk-clip"], "--scaled-loss does not work with --qk-clip: leave one out"),
        (["--scaled-loss", 0], "--scaled-loss 0 must be positive"),
    ],
)
def test_it_refuses_in_one_line(corpus: Path, words: list[object], message: str) -> None:
    outcome = train(1, *flags(corpus, "--micro-batch-size", 2, *words), entry=main_with_feature)
    assert outcome.code == 2
    assert outcome.text.endswith(f"pretrain_gpt_hdp.py: error: {message}\n")


def test_without_its_row_the_flag_is_unknown(corpus: Path) -> None:
    outcome = train(1, *flags(corpus, "--micro-batch-size", 2, "--scaled-loss", 3))
    assert outcome.code == 2
    assert "--scaled-loss" in outcome.text
