"""Flag of the chunked loss."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bytescale_ext.config.loss_chunks import LossChunks
from megatron.bytescale.features.loss_chunks import LOSS_CHUNKS
from tests.config.runs import run_of


def test_the_flag_is_the_number_of_tokens() -> None:
    assert LOSS_CHUNKS.resolve(LOSS_CHUNKS.read(Namespace(chunked_cross_entropy=8)), run_of()) == LossChunks(8)
    with pytest.raises(ValueError, match=r"--chunked-cross-entropy 0 must be at least 1 token"):
        LOSS_CHUNKS.resolve(LOSS_CHUNKS.read(Namespace(chunked_cross_entropy=0)), run_of())
