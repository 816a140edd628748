"""Numbers of draft heads that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from bytescale_ext.config.drafts import KINDS, LAYERS, DraftConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("eagle", 5, 2, 0.7), "--draft-heads eagle: choose one of clover, medusa"),
        (("clover", 0, 2, 0.7), "--num-draft-heads 0 must be at least 1"),
        (("clover", 5, -1, 0.7), "--draft-layers -1 must be at least 0"),
        (("medusa", 5, 0, 0.0), "--draft-decay 0 must be above 0"),
        (("medusa", 5, 0, 1.5), "--draft-decay 1.5 must be above 0 and at most 1"),
        (("clover", 5, 2, 0.7, -1.0), "--draft-hidden-weight -1 must be 0 or more"),
        (("clover", 5, 2, 0.7, float("nan")), "--draft-hidden-weight nan must be 0 or more"),
    ],
)
def test_bad_numbers(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftConfig(*values)


def test_each_kind_has_its_layers() -> None:
    assert set(LAYERS) == set(KINDS)
    assert DraftConfig("medusa", 1, LAYERS["medusa"], 1.0).num_layers == 0
