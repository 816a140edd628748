"""Writes a Megatron data set (``.bin`` and ``.idx``) from files, one document per file or per JSONL line.

Without a tokenizer each byte is a token, and id 256 ends each document. Megatron trains on such data with
``BYTE_LEVEL_FLAGS``: its ``NullTokenizer`` provides the two numbers that training needs, the vocabulary size and the
end-of-document id, which is the last id. (Megatron's ``ByteLevelTokenizer`` does not fit: ``--tokenizer-type`` does not
offer it, and it ends documents with id 0, which is also a byte.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from bytescale_ext.data.corpus.sidecar import HEADER, VALUES, WEIGHTS, weights_of, write_header
from bytescale_ext.data.samples.sources import Entry, checked_prefix, raw_contents
from bytescale_ext.data.samples.texts import (
    BYTE_LEVEL_EOD,
    BYTE_LEVEL_VOCAB_SIZE,
    Encode,
    Tokenizer,
    check_ids,
    encoder,
    json_text,
    json_weights,
    refuse_code_of_folders,
)
from bytescale_ext.errors import one_line
from bytescale_ext.new_file import new_file, private_folder

BYTE_LEVEL_FLAGS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(BYTE_LEVEL_VOCAB_SIZE))


WEIGHT_FILES = tuple(weights_of("") + suffix for suffix in (VALUES, HEADER))
"""Suffixes of the weights of a data set."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a JSONL line.

    Attributes:
        text: key of the text.
        weights: key of the weights of its tokens, or None.
    """

    text: str = "text"
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class _Document:
    """Tokens of a document and their weights, [n] each, and its place. Without weights the second is empty."""

    tokens: np.ndarray
    weights: np.ndarray
    where: str


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """Figures of a written corpus. Lengths are tokens per document, including the end-of-document token."""

    prefix: str
    num_documents: int
    num_tokens: int
    median_tokens: int
    p90_tokens: int
    p99_tokens: int
    max_tokens: int
    num_files: int
    num_skipped_empty: int
    num_too_long: int
    num_not_utf8: int
    dtype: str
    vocab_size: int
    eod: int


def build_megatron_tokenizer(settings: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer built by Megatron. ``settings``: fields of Megatron's ``TokenizerConfig``.

    Raises:
        ValueError: the type is unknown, a file is missing, or a package for it is not installed.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.config import TokenizerConfig

    known = {field.name: getattr(TokenizerConfig(), field.name) for field in dataclasses.fields(TokenizerConfig)}
    values = SimpleNamespace(**{**known, **settings, "pad_vocab_size": False})
    if values.metadata_path is not None and not Path(values.metadata_path).exists():
        raise ValueError(f"--tokenizer-metadata {values.metadata_path}: no such file")
    refuse_code_of_folders()
    try:
        tokenizer: Tokenizer = build_tokenizer(values)
        _ = int(tokenizer.eod), int(tokenizer.vocab_size)
    except ImportError as error:
        raise ValueError(f"{values.tokenizer_type}: {error}; install that package") from error
    except ValueError:
        raise
    except Exception as error:  # Megatron and the libraries of tokenizers raise many types
        raise ValueError(
            f"{values.tokenizer_type}: Megatron cannot build it ({one_line(error) or type(error).__name__}): "
            "give --tokenizer-model, or --vocab-file and --merge-file"
        ) from error
    return tokenizer


def write_corpus(
    prefix: str,
    entries: Sequence[Entry],
    *,
    tokenizer: Tokenizer | None = None,
    keys: Keys = Keys(),
    num_tokens: int | None = None,
    seed: int = 1234,
) -> CorpusSummary:
    """Write the documents of ``entries`` to ``prefix``.bin and ``prefix``.idx, replacing files of that name.

    Both files are written under temporary names and renamed at the end, so a killed run leaves no partial data set.

    Args:
        prefix: path without suffix; its folder is created.
        entries: documents, in order.
        tokenizer: None for bytes.
        keys: keys in a JSONL line. With a key of weights, ``PREFIX.weights`` is written too.
        num_tokens: stop after the document that reaches this number of tokens. Documents are then taken in an order
            shuffled by ``seed``, so that a small corpus has the same distribution of lengths. None: all documents, in
            order.
        seed: seed of the shuffle.

    Raises:
        ValueError: the folder cannot be written, a JSONL line is bad, or no document has any text.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(f"--tokens {num_tokens}: give 1 or more")
    if num_tokens is not None:
        entries = [entries[i] for i in np.random.RandomState(seed).permutation(len(entries)).tolist()]
    vocab_size = BYTE_LEVEL_VOCAB_SIZE if tokenizer is None else int(tokenizer.vocab_size)
    dtype = DType.optimal_dtype(vocab_size)
    encode = encoder(tokenizer)
    tally = DocumentTally(entries)
    with whole_files(prefix, WEIGHT_FILES if keys.weights else ()) as partial:
        builder = IndexedDatasetBuilder(partial + ".bin", dtype=dtype)
        beside = new_file(weights_of(partial) + VALUES, is_binary=True) if keys.weights else contextlib.nullcontext()
        try:
            with beside as weights:
                total = 0
                for document in _documents(entries, encode, keys, tally):
                    check_ids(document.tokens, dtype, document.where)
                    builder.add_document(document.tokens, [len(document.tokens)])
                    if weights is not None:
                        weights.write(document.weights.tobytes())
                    total += len(document.tokens)
                    if num_tokens is not None and total >= num_tokens:
                        break
        finally:
            builder.data_file.close()
        if not tally.lengths:
            long = sum(entry.is_too_long for entry in entries)
            reason = f"{long} of them too long and the others empty" if long else "all of them empty"
            raise ValueError(f"{len(entries)} documents, {reason}: nothing to write, choose other files")
        builder.finalize(partial + ".idx")
        if keys.weights:
            write_header(weights_of(partial), partial, WEIGHTS, "float32")
    eod = BYTE_LEVEL_EOD if tokenizer is None else int(tokenizer.eod)
    return tally.summary(prefix, np.dtype(dtype).name, vocab_size, eod)


def write_tokens(prefix: Path, documents: Iterable[np.ndarray], dtype: type[np.integer] = np.uint16) -> None:
    """Write the given token ids, [n] per document, to ``prefix``.bin and ``prefix``.idx.

    ``dtype``: the storage type; it must be able to hold every id.
    """
    with whole_files(str(prefix)) as partial:
        builder = IndexedDatasetBuilder(partial + ".bin", dtype=dtype)
        for tokens in documents:
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(partial + ".idx")


@contextmanager
def whole_files(prefix: str, beside: Sequence[str] = ()) -> Iterator[str]:
    """Yield a temporary prefix; on success its files replace the files of ``prefix``, on failure they are deleted.

    ``beside``: suffixes of further files, after ``.bin`` and ``.idx``.
    """
    target = checked_prefix(prefix)
    with private_folder(target.parent, target.name) as folder:
        partial = str(folder / target.name)
        yield partial
        # Remove the old index first, so that an old index never describes new data.
        Path(prefix + ".idx").unlink(missing_ok=True)
        for suffix in (".bin", *beside, ".idx"):
            os.replace(partial + suffix, prefix + suffix)


class DocumentTally:
    """Counts documents while they are written."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.lengths: list[int] = []
        self.files: set[Path] = set()
        self.num_skipped_empty = 0
        self.num_too_long = sum(entry.is_too_long for entry in entries)
        self.num_not_utf8 = 0

    def summary(self, prefix: str, dtype: str, vocab_size: int, eod: int) -> CorpusSummary:
        lengths = np.array(self.lengths, dtype=np.int64)
        median, p90, p99 = (int(value) for value in np.quantile(lengths, (0.5, 0.9, 0.99), method="nearest"))
        return CorpusSummary(
            prefix=prefix,
            num_documents=len(lengths),
            num_tokens=int(lengths.sum()),
            median_tokens=median,
            p90_tokens=p90,
            p99_tokens=p99,
            max_tokens=int(lengths.max()),
            num_files=len(self.files),
            num_skipped_empty=self.num_skipped_empty,
            num_too_long=self.num_too_long,
            num_not_utf8=self.num_not_utf8,
            dtype=dtype,
            vocab_size=vocab_size,
            eod=eod,
        )


def _documents(entries: Sequence[Entry], encode: Encode, keys: Keys, tally: DocumentTally) -> Iterator[_Document]:
    """Yield the documents that are not empty, and count them. Raises ValueError for a bad line."""
    for entry, raw in raw_contents(entries):
        tally.files.add(entry.path)
        where = f"{entry.path}:{entry.line}"
        text = raw if entry.line is None else json_text(raw, keys.text, where)
        if not text:
            tally.num_skipped_empty += 1
            continue
        try:
            tokens, is_utf8 = encode(text)
        except ValueError as error:  # a NullTokenizer reads numbers only
            reason = f"the tokenizer cannot read the text ({one_line(error)}): change --tokenizer-type"
            raise ValueError(f"{entry.path if entry.line is None else where}: {reason}") from error
        weights = np.zeros(0, dtype=np.float32)
        if keys.weights is not None:
            if entry.line is None:
                raise ValueError(
                    f"{entry.path}: weights are fields of records of JSON files: change --from or --weights"
                )
            weights = json_weights(raw, keys.weights, where, len(tokens))
        tally.num_not_utf8 += not is_utf8
        tally.lengths.append(len(tokens))
        yield _Document(tokens, weights, where if entry.line is not None else str(entry.path))
