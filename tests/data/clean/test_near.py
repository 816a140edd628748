"""Near-duplicates: signatures, and decisions across several sources and tasks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.clean.near import Signatures
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.shelf import decisions_path, shelved
from bytescale_ext.data.clean.words import jaccard, shingles
from tests.data.cleaning import duplicates, folder_of, run_recipe, text, told, words
from tests.sample import seeds

STEPS = ("exact", "near")


def signatures(tmp_path: Path) -> Signatures:
    return Signatures(Recipe((), buckets=8, hashes=16), tmp_path)


def test_signatures_estimate_the_similarity(tmp_path: Path) -> None:
    made = signatures(tmp_path)
    one, other = text(1, 600), text(1, 600, changed=100)
    hashes = [np.array(made.get_signature(made.get_shingles(each))).ravel() for each in (one, other)]
    similarity = jaccard(shingles(one, 5), shingles(other, 5))
    assert similarity > 0.95
    assert np.mean(hashes[0] == hashes[1]) == pytest.approx(similarity, abs=0.1)
    far = np.array(made.get_signature(made.get_shingles(text(2, 600)))).ravel()
    assert np.mean(hashes[0] == far) < 0.1


def corpus(tmp_path: Path, names: str = "abcd") -> Recipe:
    """Write two sources: a text, its copy in the other source, a changed copy, a longer copy, and other texts."""
    bodies = {"x.txt": text(1), "y.txt": text(2), "z.txt": text(3)}
    docs = folder_of(tmp_path, "docs", bodies)
    changed = {
        f"{names[0]}.txt": text(1),
        f"{names[1]}.txt": text(2, changed=100),
        f"{names[2]}.txt": text(3) + "\nand a few more words",
        f"{names[3]}.txt": text(4),
    }
    return Recipe((docs, folder_of(tmp_path, "copies", changed)), steps=STEPS, tasks=3)


def kept_texts(work: Path, tasks: int) -> set[str]:
    decided = [np.load(decisions_path(work, task)) for task in range(tasks)]
    return {
        str(values["text"]) for task in range(tasks) for number, values in shelved(work, task)
        if decided[task]["kept"][number]
    }  # fmt: skip


@pytest.mark.slow
def test_one_of_each_cluster_stays_over_all_sources(tmp_path: Path) -> None:
    recipe = corpus(tmp_path)
    run_recipe(recipe, tmp_path / "work")
    kept = kept_texts(tmp_path / "work", recipe.tasks)
    assert len(kept) == 4
    assert text(3) + "\nand a few more words" in kept  # the longer copy
    counts = told(tmp_path / "work").counts
    assert sum(one.get("exact", 0) for one in counts.values()) == 1
    assert sum(one.get("near", 0) for one in counts.values()) == 2
    lines = duplicates(tmp_path / "work")
    assert {line["dropped"] for line in lines} >= {"docs/z.txt"}
    assert sorted(line["jaccard"] for line in lines)[-1] == 1
    assert all(0.8 <= line["jaccard"] <= 1 for line in lines)


@pytest.mark.slow
def test_the_order_of_files_changes_nothing(tmp_path: Path) -> None:
    found = []
    for number, (names, tasks, reverse) in enumerate((("abcd", 3, False), ("dcba", 1, False), ("abcd", 2, True))):
        folder = tmp_path / str(number)
        recipe = corpus(folder, names)
        sources = recipe.sources[::-1] if reverse else recipe.sources
        run_recipe(Recipe(sources, steps=STEPS, tasks=tasks), folder / "work")
        found.append(kept_texts(folder / "work", tasks))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_similarity_is_verified(tmp_path: Path) -> None:
    """With few hashes all similar texts are candidates, but only texts above the similarity limit are dropped."""
    half = text(1, 100)
    bodies = {"a.txt": half + "\n" + text(5, 100), "b.txt": half + "\n" + text(6, 100), "c.txt": text(7)}
    docs = folder_of(tmp_path, "docs", bodies)
    for least, kept in ((0.8, 3), (0.2, 2)):
        recipe = Recipe((docs,), steps=STEPS, buckets=40, hashes=1, jaccard=least)
        run_recipe(recipe, tmp_path / f"work{least}")
        assert len(kept_texts(tmp_path / f"work{least}", 1)) == kept


def test_ids_that_come_again_are_counted_or_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text(i), "id": str(i % 2)}) + "\n" for i in range(4)))
    docs = folder_of(tmp_path, "docs", {})
    source = type(docs)("lines", str(tmp_path / "a.jsonl"), "jsonl", "*", ())
    run_recipe(Recipe((source,), steps=STEPS), tmp_path / "work")
    assert told(tmp_path / "work").counts["lines"]["id again"] == 2
    with pytest.raises(ValueError, match=r"source lines: several documents have the id '[01]': make ids unique"):
        run_recipe(Recipe((source,), steps=STEPS, on_bad="fail"), tmp_path / "other")


def families(random: np.random.RandomState) -> dict[str, str]:
    """Return texts, some with a few changed words of others, in random order."""
    bodies = []
    for seed in range(8):
        made = words(150, 100 + seed)
        bodies.append(" ".join(made))
        for _ in range(random.randint(0, 4)):
            changed = list(made)
            for place in random.choice(150, random.randint(1, 6), replace=False):
                changed[place] = f"new{random.randint(1000)}"
            bodies.append(" ".join(changed))
    return {f"{place:03}.txt": bodies[one] for place, one in enumerate(random.permutation(len(bodies)).tolist())}


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4))
def test_what_stays_equals_a_search_over_all_pairs(seed: int, tmp_path: Path) -> None:
    """With enough buckets every pair is found, so the result equals the definition, which the test implements."""
    bodies = families(np.random.RandomState(seed))
    recipe = Recipe((folder_of(tmp_path, "docs", bodies),), steps=STEPS, buckets=60, hashes=2, jaccard=0.8, tasks=2)
    run_recipe(recipe, tmp_path / "work")
    found = kept_texts(tmp_path / "work", recipe.tasks)
    runs = {body: {tuple(body.split()[i : i + 5]) for i in range(len(body.split()) - 4)} for body in bodies.values()}

    def similarity(one: str, other: str) -> float:
        return len(runs[one] & runs[other]) / len(runs[one] | runs[other])

    kept = list(found)
    assert all(similarity(one, other) < 0.8 for i, one in enumerate(kept) for other in kept[:i])
    for body in set(bodies.values()) - found:
        assert max(similarity(body, one) for one in found if len(one) >= len(body)) >= 0.8
    lines = duplicates(tmp_path / "work")
    for line in lines:
        pair = (bodies[line[side].removeprefix("docs/")] for side in ("dropped", "kept"))
        assert line["jaccard"] == pytest.approx(similarity(*pair), abs=1e-3)
