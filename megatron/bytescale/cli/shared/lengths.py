"""Document lengths from files, and the pieces of documents that a step gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bytescale_ext.errors import one_line
from bytescale_ext.json_input import check_stored

LONGEST = 1 << 31  # tokens of a document; a Megatron index cannot hold more
MOST_PIECES = 50_000_000


def read_lengths(path: Path, start: int = 0, num_sequences: int | None = None) -> list[int]:
    """Return the tokens of documents ``start`` to ``start + num_sequences`` of an .idx or .npy file.

    Empty documents of an .idx file are left out, because training makes no sample of them.

    Raises:
        ValueError: the file is missing or of another kind, has too few documents, holds no token between these
            documents, or is an .npy file with a length that is not positive.
    """
    if path.is_dir():
        raise ValueError(f"--lengths {path} is a folder; give one of its .idx or .npy files")
    if not path.exists():
        raise ValueError(f"--lengths {path}: no such file")
    if path.suffix == ".idx":
        from bytescale_ext.data.samples.lengths import read_idx_lengths

        values = np.asarray(read_idx_lengths(path))
    elif path.suffix == ".npy":
        values = _read_npy(path)
    else:
        raise ValueError(f"--lengths {path}: give a Megatron index (.idx) or a numpy array (.npy)")
    if not len(values):
        raise ValueError(f"--lengths {path} has no documents")
    stop = len(values) if num_sequences is None else start + num_sequences
    if not 0 <= start < len(values):
        raise ValueError(f"--start {start}: {path} has {len(values)} documents, numbered from 0")
    if stop > len(values):
        raise ValueError(
            f"--num-sequences {num_sequences}: {path} has {len(values) - start} documents from document {start} on; "
            "give at most that many"
        )
    lengths = values[start:stop]
    if path.suffix == ".idx":
        lengths = lengths[lengths > 0]
        if not lengths.size:
            raise ValueError(f"--lengths {path}: documents {start} to {stop - 1} hold no token; choose others")
    if lengths.min() < 1:
        index = int(np.argmax(lengths < 1))
        raise ValueError(
            f"--lengths {path}: document {start + index} has {lengths[index]} tokens, at least 1 is needed"
        )
    if lengths.max() > LONGEST:
        index = int(np.argmax(lengths > LONGEST))
        raise ValueError(f"--lengths {path}: document {start + index} has {lengths[index]} tokens, more than 2^31")
    return [int(length) for length in lengths]


def cut_lengths(lengths: Sequence[int], seq_length: int | None) -> list[int]:
    """Return the lengths of the pieces of at most ``seq_length`` tokens of each document, in order; None: no cuts."""
    if seq_length is None:
        return list(lengths)
    if sum(-(-length // seq_length) for length in lengths) > MOST_PIECES:
        raise ValueError(f"the documents have more than {MOST_PIECES:,} pieces of {seq_length} tokens: give fewer")
    return [min(seq_length, length - begin) for length in lengths for begin in range(0, length, seq_length)]


def draw_pieces(lengths: Sequence[int], seq_length: int, count: int, seed: int) -> list[int]:
    """Return the lengths of ``count`` random pieces of documents; pieces repeat only if there are too few."""
    pieces = cut_lengths(lengths, seq_length)
    drawn = np.random.default_rng(seed).choice(pieces, count, replace=len(pieces) < count)
    return [int(length) for length in drawn]


def _read_npy(path: Path) -> npt.NDArray[np.integer]:
    try:
        check_stored(path)
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, which fails in many ways
        raise ValueError(f"--lengths {path} is not a numpy array: {one_line(error, 200)}") from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        content = f"shape {values.shape} of {values.dtype}" if isinstance(values, np.ndarray) else "several arrays"
        raise ValueError(f"--lengths {path} holds {content}; it must be one-dimensional and of integers")
    return values
