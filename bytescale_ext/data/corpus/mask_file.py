"""Mask of the answers in a data set: ``PREFIX.mask.bin``, with one byte per token, and its header ``PREFIX.mask.json``.

The header contains hashes of the mask and of the data set's ``.idx``, so that the mask of another data set is refused
before training. The mask has the order of the tokens in the ``.bin`` file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.corpus.windows_file import sha256_of
from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.json_input import json_settings
from bytescale_ext.new_file import write_text

MASK: Final = ".mask.bin"
HEADER: Final = ".mask.json"
_VERSION: Final = 1
_AGAIN: Final = "write conversations and masks again with bytescale corpus --sft"


@dataclass(frozen=True, slots=True)
class MaskHeader:
    """Header of a mask.

    Attributes:
        num_tokens: number of tokens of the data set.
        num_answer_tokens: number of tokens in answers.
        idx_sha256: hash of the ``.idx`` file.
        mask_sha256: hash of the mask.
        version: version of the format.
    """

    num_tokens: int
    num_answer_tokens: int
    idx_sha256: str
    mask_sha256: str
    version: int = _VERSION


def write_header(partial: str) -> MaskHeader:
    """Write ``partial``.mask.json for the complete mask and index of the same prefix, and return the header."""
    mask = np.fromfile(partial + MASK, dtype=np.uint8)
    header = MaskHeader(
        num_tokens=len(mask),
        num_answer_tokens=int(np.count_nonzero(mask)),
        idx_sha256=sha256_of(partial + ".idx"),
        mask_sha256=sha256_of(partial + MASK),
    )
    write_text(partial + HEADER, json.dumps(dataclasses.asdict(header), indent=2) + "\n")
    return header


def check_mask(prefix: str, whole: bool = True) -> MaskHeader:
    """Check that a data set has a mask that belongs to it, and return the header of the mask.

    ``whole`` also reads the mask and compares its hash; one rank is enough for this.

    Raises:
        ValueError: a file is missing, damaged or of another data set, or no token is an answer.
    """
    num_tokens = check_indexed_dataset(prefix).num_tokens
    header_file = prefix + HEADER
    try:
        header = MaskHeader(**json_settings(Path(header_file).read_text(encoding="utf-8")))
        size = os.path.getsize(prefix + MASK)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: no such file, so the answers are unknown: {_AGAIN}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{header_file}: not the header of a mask ({error}): {_AGAIN}") from error
    if header.version != _VERSION:
        raise ValueError(f"{header_file}: version {header.version}, only version {_VERSION} is supported: {_AGAIN}")
    if header.num_tokens != num_tokens or header.idx_sha256 != sha256_of(prefix + ".idx"):
        raise ValueError(f"{prefix + MASK}: the mask belongs to another data set than {prefix}.idx: {_AGAIN}")
    if size != num_tokens or (whole and sha256_of(prefix + MASK) != header.mask_sha256):
        raise ValueError(f"{prefix + MASK} does not match its header {Path(header_file).name}: {_AGAIN}")
    if not header.num_answer_tokens:
        raise ValueError(f"{prefix}: no token is an answer, so there is nothing to train on: {_AGAIN}")
    return header


def open_mask(prefix: str) -> np.ndarray:
    """Return a memory map of the mask of a data set: uint8 [num_tokens], 1 for answers."""
    return np.asarray(np.memmap(prefix + MASK, dtype=np.uint8, mode="r"))
