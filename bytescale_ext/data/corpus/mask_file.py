"""Which tokens of a data set are answers: ``PREFIX.mask.bin``, a byte for each token, beside ``PREFIX.mask.json``.

The second file holds hashes of the first and of the data set's ``.idx``, so that the mask of another data set is
refused before training. The mask lies as the tokens of the ``.bin`` file do: end to end.
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

MASK: Final = ".mask.bin"
HEADER: Final = ".mask.json"
_VERSION: Final = 1
_AGAIN: Final = "write conversations and masks again with bytescale corpus --sft"


@dataclass(frozen=True, slots=True)
class MaskHeader:
    """What a mask belongs to.

    Attributes:
        num_tokens: tokens of the data set.
        num_answer_tokens: those of them that are answers.
        idx_sha256: hash of the ``.idx`` file.
        mask_sha256: hash of the mask.
        version: of this format.
    """

    num_tokens: int
    num_answer_tokens: int
    idx_sha256: str
    mask_sha256: str
    version: int = _VERSION


def write_header(partial: str) -> MaskHeader:
    """Write ``partial``.mask.json for the mask and the index of that prefix, which are complete; return its content."""
    mask = np.fromfile(partial + MASK, dtype=np.uint8)
    header = MaskHeader(
        num_tokens=len(mask),
        num_answer_tokens=int(np.count_nonzero(mask)),
        idx_sha256=sha256_of(partial + ".idx"),
        mask_sha256=sha256_of(partial + MASK),
    )
    Path(partial + HEADER).write_text(json.dumps(dataclasses.asdict(header), indent=2) + "\n", encoding="utf-8")
    return header


def check_mask(prefix: str, whole: bool = True) -> MaskHeader:
    """Check that a data set has a mask and that it is its own; return the header of the mask.

    ``whole``: also read all of the mask and compare its hash, which is enough on one rank.

    Raises:
        ValueError: a file is missing, damaged or of another data set, or no token is an answer.
    """
    num_tokens = check_indexed_dataset(prefix).num_tokens
    described = prefix + HEADER
    try:
        header = MaskHeader(**json.loads(Path(described).read_text(encoding="utf-8")))
        size = os.path.getsize(prefix + MASK)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: no such file, so nothing says what the answers are: {_AGAIN}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{described}: not the header of a mask ({error}): {_AGAIN}") from error
    if header.version != _VERSION:
        raise ValueError(f"{described}: version {header.version}, only version {_VERSION} is read: {_AGAIN}")
    if header.num_tokens != num_tokens or header.idx_sha256 != sha256_of(prefix + ".idx"):
        raise ValueError(f"{prefix + MASK}: the mask of another data set than {prefix}.idx: {_AGAIN}")
    if size != num_tokens or (whole and sha256_of(prefix + MASK) != header.mask_sha256):
        raise ValueError(f"{prefix + MASK} is not the mask that {Path(described).name} describes: {_AGAIN}")
    if not header.num_answer_tokens:
        raise ValueError(f"{prefix}: no token is an answer, so there is nothing to train on: {_AGAIN}")
    return header


def open_mask(prefix: str) -> np.ndarray:
    """Return the mask of a data set, mapped from its file: uint8 [num_tokens], 1 for answers."""
    return np.asarray(np.memmap(prefix + MASK, dtype=np.uint8, mode="r"))
