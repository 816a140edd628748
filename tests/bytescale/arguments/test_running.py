"""Values that a running training reads from Megatron's arguments."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.running import Batches, SampleKind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "windows of 1,024 tokens"),
        ({"hybrid_data_parallel": True}, "documents"),
        ({"hybrid_data_parallel": True, "trains_on_answers": True}, "conversations"),
        ({"sculpt_windows": [Path("a/b.npy"), Path("c.npy")]}, "windows of b.npy, c.npy"),
    ],
)
def test_samples_in_words(given: dict[str, Any], words: str) -> None:
    assert str(options_of(Namespace(seq_length=1024, **given), SampleKind)) == words


def test_an_evaluation_has_as_many_samples_as_training_unless_it_is_told() -> None:
    assert Batches(8, None, 0, 0, 0, 5).evaluation == 8
    assert Batches(8, 2, 0, 0, 0, 5).evaluation == 2
