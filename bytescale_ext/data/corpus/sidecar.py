"""Sidecars of a data set: one number for each token or document, in ``PATH.bin``, and a header in ``PATH.json``.

A sidecar has the order of the tokens in the data set's ``.bin`` file. Its header contains a hash of its numbers and an
identity of the data set, so that a sidecar of other data or of another tokenizer is refused before it is used.

Weights of the loss are the sidecar ``PREFIX.weights``. A loss mask has the weights 0 and 1, in one byte each. The
sidecar ``PREFIX.groups`` has the number of each document's group, from 0; the documents of a group follow one another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.corpus.windows_file import sha256_of
from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.json_input import json_settings, stored_text
from bytescale_ext.json_input import whole as whole_number
from bytescale_ext.new_file import write_text

VALUES: Final = ".bin"
HEADER: Final = ".json"
DTYPES: Final = ("uint8", "int32", "float32")
_VERSION: Final = 3
_ENDS: Final = 1 << 20  # bytes at both ends of the data that belong to its identity
_CHUNK: Final = 1 << 22  # numbers that are checked at a time


@dataclass(frozen=True, slots=True)
class Kind:
    """What the numbers of a sidecar are.

    Attributes:
        name: name in headers.
        content: the numbers in messages.
        again: advice to write the numbers again.
        of_documents: whether each document has a number, instead of each token.
    """

    name: str
    content: str
    again: str
    of_documents: bool = False


WEIGHTS: Final = Kind("weights", "weights", "write the data set again with bytescale corpus --sft or --weights")

LOGPROBS: Final = Kind("logprobs", "log-probabilities", "write them again with bytescale logprobs")

ADVANTAGES: Final = Kind(
    "advantages", "advantages", "write the data set again with bytescale corpus --rewards or --advantages"
)

GROUPS: Final = Kind(
    "groups", "groups", "write the data set again with bytescale corpus --pairs or --groups", of_documents=True
)


@dataclass(frozen=True, slots=True)
class SidecarHeader:
    """Header of a sidecar.

    Attributes:
        kind: name of the ``Kind``.
        dtype: type of the numbers, one of ``DTYPES``.
        num_values: number of numbers: tokens or documents of the data set.
        num_nonzero: number of numbers other than 0.
        data_sha256: identity of the data set (``identity_of``).
        values_sha256: hash of the numbers.
        version: version of the format.
    """

    kind: str
    dtype: str
    num_values: int
    num_nonzero: int
    data_sha256: str
    values_sha256: str
    version: int = _VERSION

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.num_values * np.dtype(self.dtype).itemsize


def weights_of(prefix: str) -> str:
    """Return the path of a data set's weights, without suffix."""
    return prefix + ".weights"


def groups_of(prefix: str) -> str:
    """Return the path of a data set's groups, without suffix."""
    return prefix + ".groups"


def advantages_of(prefix: str) -> str:
    """Return the path of a data set's advantages, without suffix."""
    return prefix + ".advantages"


def old_logprobs_of(prefix: str) -> str:
    """Return the path of log-probabilities under the policy that wrote a data set, without suffix."""
    return prefix + ".old"


def identity_of(prefix: str) -> str:
    """Return a hash of a data set's ``.idx`` file, the size of its ``.bin`` file and the tokens at both ends of it."""
    digest = hashlib.sha256(sha256_of(prefix + ".idx").encode())
    size = os.path.getsize(prefix + ".bin")
    digest.update(str(size).encode())
    with open(prefix + ".bin", "rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        digest.update(file.read(_ENDS))
    return digest.hexdigest()


def write_header(path: str, prefix: str, kind: Kind, dtype: str) -> SidecarHeader:
    """Write the header of the complete numbers ``path``.bin of a data set, and return it.

    Raises:
        ValueError: a number is infinite or not a number.
    """
    values = np.memmap(path + VALUES, dtype=dtype, mode="r")
    header = SidecarHeader(
        kind=kind.name,
        dtype=dtype,
        num_values=len(values),
        num_nonzero=int(np.count_nonzero(values)),
        data_sha256=identity_of(prefix),
        values_sha256=sha256_of(path + VALUES),
    )
    _check_finite(path, values, kind)
    write_text(path + HEADER, json.dumps(dataclasses.asdict(header), indent=2) + "\n")
    return header


def check_sidecar(path: str, prefix: str, kind: Kind, whole: bool = True) -> SidecarHeader:
    """Check that a sidecar belongs to a data set, and return its header.

    ``whole`` also reads the numbers, compares their hash, and refuses infinite ones; one rank is enough for this.

    Raises:
        ValueError: a file is missing or damaged, the sidecar is of another kind or of another data set, or a number is
            infinite or not a number.
    """
    info = check_indexed_dataset(prefix)
    num_values = info.num_documents if kind.of_documents else info.num_tokens
    header_file, values_file = path + HEADER, path + VALUES
    try:
        header = _header_in(header_file)
        size = os.path.getsize(values_file)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: no such file, so the {kind.content} are unknown: {kind.again}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{header_file}: not the header of a sidecar ({error}): {kind.again}") from error
    if header.version != _VERSION:
        raise ValueError(f"{header_file}: version {header.version}, only version {_VERSION} is supported: {kind.again}")
    if header.kind != kind.name or header.dtype not in DTYPES:
        raise ValueError(f"{header_file}: the numbers are {header.kind!r}, not {kind.content}: {kind.again}")
    if header.num_values != num_values or header.data_sha256 != identity_of(prefix):
        raise ValueError(
            f"{values_file}: the {kind.content} belong to another data set than {prefix}.idx, or to another tokenizer: "
            f"{kind.again}"
        )
    try:
        is_same = size == header.num_bytes and (not whole or _holds(values_file, header))
    except OSError as error:
        raise ValueError(f"{values_file}: {error.strerror}: {kind.again}") from error
    if not is_same:
        raise ValueError(f"{values_file} does not match its header {Path(header_file).name}: {kind.again}")
    if whole:
        _check_finite(path, np.memmap(values_file, dtype=header.dtype, mode="r"), kind)
    return header


def _header_in(file: str) -> SidecarHeader:
    """Read a header. Raises OSError, ValueError or TypeError for a file that is none."""
    header = SidecarHeader(**json_settings(stored_text(file)))
    if not 0 <= whole_number(header.num_nonzero) <= whole_number(header.num_values):
        raise ValueError(f"{header.num_nonzero} of {header.num_values} numbers are not 0")
    whole_number(header.version)
    return header


def _holds(file: str, header: SidecarHeader) -> bool:
    """Return whether a file of numbers has the hash and the count of its header. Raises OSError for another file."""
    if sha256_of(file) != header.values_sha256:
        return False
    return header.num_nonzero == np.count_nonzero(np.memmap(file, dtype=header.dtype, mode="r"))


def check_weights(prefix: str, whole: bool = True) -> SidecarHeader:
    """Check the weights of a data set as ``check_sidecar`` does, and refuse weights that are all 0."""
    header = check_sidecar(weights_of(prefix), prefix, WEIGHTS, whole)
    if not header.num_nonzero:
        raise ValueError(f"{prefix}: no token has a weight, so there is nothing to train on: {WEIGHTS.again}")
    return header


def group_bounds(prefix: str, whole: bool = True) -> np.ndarray:
    """Return the first document of each group of a data set, and the number of documents: int64 [groups + 1].

    Raises:
        ValueError: the groups are damaged (``check_sidecar``), or a group has no documents.
    """
    path = groups_of(prefix)
    if check_sidecar(path, prefix, GROUPS, whole).dtype == "float32":
        raise ValueError(f"{path + HEADER}: groups are whole numbers, not float32: {GROUPS.again}")
    groups = open_sidecar(path).astype(np.int64)
    steps = np.diff(groups, prepend=-1)
    bad = (steps < 0) | (steps > 1)
    if len(groups) == 0 or steps[0] != 1 or bad.any():
        document = int(bad.argmax())
        before = f"group {groups[document - 1]}" if document else "no other"
        raise ValueError(
            f"{path + VALUES}: document {document} is of group {groups[document]}, after {before}, so a group has no "
            f"documents or is divided: {GROUPS.again}"
        )
    return np.append(np.flatnonzero(steps), len(groups))


def open_sidecar(path: str) -> np.ndarray:
    """Return a memory map of the numbers of a checked sidecar: [num_values], of the header's type."""
    header = _header_in(path + HEADER)
    return np.asarray(np.memmap(path + VALUES, dtype=header.dtype, mode="r"))


def _check_finite(path: str, values: np.ndarray, kind: Kind) -> None:
    """Raise ValueError for the first number that is infinite or not a number; ``values``: [num_values]."""
    if values.dtype != np.float32:
        return
    for start in range(0, len(values), _CHUNK):
        finite = np.isfinite(values[start : start + _CHUNK])
        if not finite.all():
            token = start + int(finite.argmin())
            raise ValueError(
                f"{path + VALUES}: token {token} has the number {values[token]}, and {kind.content} must be finite: "
                f"{kind.again}"
            )
