"""Cases by name, their links, and the arms that they refuse."""

from __future__ import annotations

import pytest

from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from scripts.bench.cluster.cases import (
    ARMS,
    CONTEXT,
    FULL,
    LINKS,
    QUICK,
    SCALE,
    SHORTEST,
    STEP_TOKENS,
    TOKENS_PER_RANK,
    Case,
    Planned,
    with_names,
)

MATCHED = (8.0, 0.8)


@pytest.mark.parametrize("text", ["byted 2x4 matched", "github 1x8 4/0.4", "wikipedia 4x2 slow 2048"])
def test_a_case_is_its_name(text: str) -> None:
    assert str(Case.parse(text)) == text
    assert Case.parse(text).num_ranks == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("byted", "give lengths, nodes x ranks and links"),
        ("poems 2x4 matched", "give lengths"),
        ("byted 2-4 matched", "2-4 is not of the form 2x4"),
        ("byted 0x4 matched", "--nodes 0"),
        ("byted 2x4 quick", "links 'quick': give one of unlimited, fast, matched, slow"),
        ("byted 2x4 matched long", "long is not a number of tokens"),
    ],
)
def test_bad_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.parse(text)


def test_links_are_multiples_of_matched_links() -> None:
    gbps = {link: Case("byted", 2, 4, link).gbps(MATCHED) for link in LINKS}
    assert gbps == {"unlimited": (0.0, 0.0), "fast": (32.0, 3.2), "matched": MATCHED, "slow": (2.0, 0.2)}
    assert Case("byted", 2, 4, "0.4").gbps(MATCHED) == (0.4, 0.4)
    topology = Case("byted", 2, 4).topology(MATCHED)
    assert (topology.intra_gbps, topology.inter_gbps, topology.num_ranks) == (8.0, 0.8, 8)


def test_short_documents_are_joined_and_keep_their_share_of_tokens() -> None:
    case = Case("byted", 1, 8)
    lengths = case.lengths(num_steps=3, seed=4)
    assert lengths == case.lengths(3, 4) != case.lengths(3, 5)
    assert SHORTEST == min(lengths) < max(lengths) <= CONTEXT
    assert len(lengths) % (3 * 8) == 0
    drawn = sample_lengths("byted", CONTEXT * SCALE, 3 * STEP_TOKENS * SCALE, 4) / SCALE
    assert sum(lengths) == pytest.approx(drawn.sum(), rel=0.05)
    assert sum(n for n in lengths if n > 2048) == pytest.approx(drawn[drawn > 2048].sum(), rel=0.01)
    assert max(Case("byted", 1, 8, context=2048).lengths(3, 4)) <= 2048


def test_reasons_of_arms_that_cannot_run() -> None:
    case = Case("byted", 2, 4)
    assert [arm for arm in ARMS if ARMS[arm].refusal(case)] == ["packed"]
    assert ARMS["packed"].refusal(case) == (
        "documents of up to 16384 tokens do not fit on one rank, which holds C = 2048 tokens"
    )
    assert not ARMS["packed"].refusal(Case("byted", 2, 4, context=TOKENS_PER_RANK))
    assert "powers of two only, not for 6 ranks" in ARMS["hybrid"].refusal(Case("byted", 2, 3))
    assert "7 ranks are not pipelines of 2 stages" in ARMS["eager"].refusal(Case("byted", 1, 7))


def test_flags_of_arms() -> None:
    case = Case("byted", 2, 4)
    assert ARMS["ours"].words(case) == ["--hdp-tokens-per-rank", "2048", "--hdp-hierarchical-rings", "auto"]
    assert ARMS["static"].words(case)[3:] == ["off", "--hdp-static-width", "8"]
    assert ARMS["eager"].words(case) == [
        "--hdp-tokens-per-rank", "4096", "--hdp-hierarchical-rings", "off",
        "--pipeline-model-parallel-size", "2", "--seq1f1b-slices", "4",
        "--seq1f1b-eager",
    ]  # fmt: skip


@pytest.mark.parametrize("planned", [QUICK, FULL], ids=["quick", "full"])
def test_each_case_is_listed_once_and_compared_with_ours(planned: tuple[Planned, ...]) -> None:
    names = [str(row.case) for row in planned]
    assert len(set(names)) == len(names)
    assert all(row.arms[0] == "ours" for row in planned)
    assert {arm for row in planned for arm in row.arms} | {"plain"} == set(ARMS)
    assert {row.case.sampler for row in planned} == {"byted", "github", "wikipedia"}


def test_cases_and_arms_can_be_named() -> None:
    (planned,) = with_names(QUICK, ["github 2x4 slow"], ["ours", "eager"])
    assert (planned.case, planned.arms) == (Case("github", 2, 4, "slow"), ("ours", "eager"))
    assert {row.arms for row in with_names(QUICK, None, ["static"])} == {("static",)}
    assert with_names(QUICK, None, None) == QUICK
