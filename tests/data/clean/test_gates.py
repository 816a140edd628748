"""Filters and masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.data.clean.gates import ADDRESS, EMAIL, DocumentFilter
from bytescale_ext.data.clean.recipe import FILTERS, Recipe, Source
from tests.data.cleaning import document, run_steps, told

PROSE = (
    "The harbour of the old town was built by sailors that have come from the north.\n"
    "It is to be seen with the lighthouse, and ships of many countries anchor in the bay.\n"
    "People say that the water is deep enough for the largest vessels of our time.\n"
    "In winter the storms of the sea reach the walls, but the boats behind them are safe.\n"
    "Children learn to sail here, and the school has boats for all of them to use.\n"
    "Visitors find a museum with maps, anchors, ropes and models of the ships of the past.\n"
)
REFUSED = {
    "gopher-quality": "short of words",
    "gopher-repetition": "The same line again.\n" * 30,
    "c4": PROSE + "int main(void) {\nreturn 0;\n} // a program, with a bracket {.\n",
    "fineweb": "menu\nhome\nabout us\ncontact\n" * 10,
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_passes_prose_and_refuses_what_it_is_for(name: str, tmp_path: Path) -> None:
    recipe = Recipe((Source("docs", ".", "text", "*", (name,)),), steps=("filters",))
    gate = DocumentFilter(recipe, tmp_path / "tallies")
    passed = run_steps([lambda *_: iter([document(PROSE, "good"), document(REFUSED[name], "bad")]), gate])
    assert [one.id for one in passed] == ["good"]  # type: ignore[attr-defined]
    ((what, count),) = told(tmp_path).counts["docs"].items()
    assert what.startswith(f"filter {name}: ")
    assert count == 1
    assert told(tmp_path).examples[what][0]["document"] == "bad"


def test_each_source_has_its_own_filters(tmp_path: Path) -> None:
    sources = (Source("docs", ".", "text", "*", ("gopher-quality",)), Source("code", ".", "text", "*", ()))
    short = [document("x = 1", "a"), document("x = 1", "b", "code")]
    gate = DocumentFilter(Recipe(sources, steps=("filters",)), tmp_path / "tallies")
    assert [one.id for one in run_steps([lambda *_: iter(short), gate])] == ["b"]  # type: ignore[attr-defined]
    off = DocumentFilter(Recipe(sources, steps=("pii",)), tmp_path / "tallies")
    assert len(run_steps([lambda *_: iter(short), off])) == 2


def test_addresses_are_masked(tmp_path: Path) -> None:
    recipe = Recipe((Source("docs", ".", "text", "*", ()),), steps=("pii",))
    body = "Write to jane.doe@corp.example.net and ann@b.org, or ping 8.8.8.8, not 10.0.0.1 or 127.0.0.1."
    found = run_steps(
        [lambda *_: iter([document(body), document("nothing", "b")]), DocumentFilter(recipe, tmp_path / "tallies")]
    )
    expected = f"Write to {EMAIL} and {EMAIL}, or ping {ADDRESS}, not 10.0.0.1 or 127.0.0.1."
    assert [one.text for one in found] == [expected, "nothing"]  # type: ignore[attr-defined]
    assert told(tmp_path).counts == {"docs": {"masked": 1}}
    assert EMAIL in str(told(tmp_path).examples["masked"][0]["text"])


def test_filters_come_in_their_order_and_see_what_the_one_before_left(tmp_path: Path) -> None:
    """C4 removes lines, and the next filter judges the remaining text."""
    recipe = Recipe((Source("docs", ".", "text", "*", ("c4", "fineweb")),), steps=("filters",))
    menu = "menu\nhome\nabout us\ncontact\nlanguage\n" * 5
    passed = run_steps(
        [lambda *_: iter([document(menu + PROSE, "page")]), DocumentFilter(recipe, tmp_path / "tallies")]
    )
    assert [one.text for one in passed] == [PROSE.strip()]  # type: ignore[attr-defined]
    alone = Recipe((Source("docs", ".", "text", "*", ("fineweb",)),), steps=("filters",))
    gate = DocumentFilter(alone, tmp_path / "alone" / "tallies")
    assert run_steps([lambda *_: iter([document(menu + PROSE, "page")]), gate]) == []
    assert told(tmp_path / "alone").counts["docs"] == {"filter fineweb: short_line_ratio": 1}
