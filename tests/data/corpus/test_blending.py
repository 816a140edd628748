"""Documents of several data sets in the shares of a mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.blending import blend_of, read_mixture
from tests.data.sources import write_data_set


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Return two data sets of 3,000 and 1,000 tokens, in documents of 10 tokens that hold their number."""
    first = [[[number] * 10] for number in range(300)]
    second = [[[1000 + number] * 10] for number in range(100)]
    return [write_data_set(tmp_path / "a", [*first, []]), write_data_set(tmp_path / "b", second)]


def test_shares_are_kept_and_no_pass_has_a_document_twice(prefixes: list[str]) -> None:
    blend = blend_of([(1.0, prefixes[0]), (1.5, prefixes[1])], 7)
    assert blend.often == pytest.approx((4000 * 0.4 / 3000, 4000 * 0.6 / 1000))
    assert blend.num_passes == 3
    passes = [[int(ids[0]) for ids in blend.documents(number)] for number in range(3)]
    assert [len(set(one)) for one in passes] == [len(one) for one in passes]
    assert [one for one in passes[0] if one >= 1000] == passes[1] == list(range(1000, 1100))
    counts = np.array([sum(one < 1000 for made in passes for one in made), sum(map(len, passes))])
    assert counts / [160, 400] == pytest.approx([1, 1], abs=0.15)
    again = blend_of([(1.0, prefixes[0]), (1.5, prefixes[1])], 7)
    assert [[int(ids[0]) for ids in again.documents(number)] for number in range(3)] == passes


def test_without_shares_each_document_is_there_once(prefixes: list[str]) -> None:
    blend = blend_of([(None, prefix) for prefix in prefixes], 7)
    assert blend.num_passes == 1
    assert [int(ids[0]) for ids in blend.documents(0)] == [*range(300), *range(1000, 1100)]


def test_a_mixture_of_data_mix(tmp_path: Path) -> None:
    path = tmp_path / "mixture"
    path.write_text("0.25 data/a\n0.75 data/b\n0 data/c\n")
    assert read_mixture(path) == [(0.25, "data/a"), (0.75, "data/b")]
    for text in ("", "a b", "1", "-1 a", "0 a", "nan a"):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a mixture of bytescale data mix"):
            read_mixture(path)
