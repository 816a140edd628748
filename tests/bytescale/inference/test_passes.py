"""Prompts are divided into slices of equal size, over the prompts of all texts."""

from __future__ import annotations

import pytest

from megatron.bytescale.inference import passes
from megatron.bytescale.inference.passes import Text, next_pieces


def test_prompts_fill_slices_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SLICE_TOKENS", 5)
    prompts = [[1, 2], [3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 14]]
    texts = [Text.of(number, prompt, 20) for number, prompt in enumerate(prompts)]
    seen: list[list[tuple[int, list[int]]]] = []
    while pieces := next_pieces(texts):
        assert sum(len(piece.tokens) for piece in pieces) <= 5
        seen.append([(texts.index(piece.text), list(piece.tokens)) for piece in pieces])
        for piece in pieces:
            assert list(piece.positions) == list(
                range(piece.text.cache.length, piece.text.cache.length + len(piece.tokens))
            )
            assert piece.visible is None
            piece.text.cache.keep(range(len(piece.tokens)))
    assert seen == [
        [(0, [1, 2]), (1, [3, 4, 5])],
        [(1, [6, 7, 8, 9]), (2, [10])],
        [(3, [11, 12, 13, 14])],
    ]
