"""Samples and servers of a file of text, for the tests of this folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bytescale_ext.data.ray.lines import LineIndex, index_lines
from bytescale_ext.data.ray.scheduler import (
    FileSamples,
    SplitSamples,
)
from bytescale_ext.data.ray.server import TokenServer
from bytescale_ext.data.samples.epochs import EpochOrder
from bytescale_ext.data.samples.lengths import sample_table
from bytescale_ext.data.samples.texts import encoder
from tests.data.text_files import SEED

SEQ_LENGTH = 64


def samples_of(path: Path, num_epochs: int = 1) -> tuple[SplitSamples, tuple[LineIndex]]:
    """Return the samples of all epochs of a file, and its index."""
    index = index_lines(str(path), 0, 1 << 40, "text", SEQ_LENGTH, encoder(None))
    table = sample_table(index.table_lengths, SEQ_LENGTH)
    rows = FileSamples(0, table.document, table.start, EpochOrder(len(table), SEED, 0))
    return SplitSamples(num_epochs * len(table), (rows,)), (index,)


def server(path: Path, limit_tokens: int = 1 << 20, **options: Any) -> TokenServer:
    """Return a server of one file with one token per byte."""
    settings = {"key": "text", "longest": SEQ_LENGTH, "build_encode": partial(encoder, None), **options}
    return TokenServer([str(path)], limit_tokens=limit_tokens, **settings)  # type: ignore[arg-type]
