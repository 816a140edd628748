"""Server of the remote loader: it reads lines, tokenizes them and serves token ranges. Runs as a Ray actor.

Its only state is a cache, so a call that is repeated after a restart gives the same answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from bytescale_ext.data.ray.lines import LineIndex, encode_text, index_lines, text_of_line, unreadable
from bytescale_ext.data.samples.texts import Encode

# Location of a sample: file, document and line; ``tokens`` and ``is_counted`` of the document as in ``LineIndex``; and
# ``start``, the sample's first token in the document.
PLACE = np.dtype(
    [
        ("file", np.int32),
        ("document", np.int64),
        ("offset", np.int64),
        ("num_bytes", np.int64),
        ("tokens", np.int64),
        ("is_counted", np.bool_),
        ("start", np.int64),
    ]
)


class TokenCache:
    """Cache of the tokens of recently used documents, with at most ``limit_tokens`` tokens."""

    def __init__(self, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self.held_tokens = 0
        self.peak_tokens = 0
        self._documents: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def get(self, key: tuple[int, int]) -> np.ndarray | None:
        """Return the tokens of a document, [n], or None."""
        tokens = self._documents.get(key)
        if tokens is not None:
            self._documents.move_to_end(key)
        return tokens

    def put(self, key: tuple[int, int], tokens: np.ndarray) -> None:
        """Store the tokens of a document, [n], unless it exceeds the limit, and evict the least recently used."""
        if len(tokens) > self.limit_tokens or key in self._documents:
            return
        while self.held_tokens + len(tokens) > self.limit_tokens:
            self.held_tokens -= len(self._documents.popitem(last=False)[1])
        self._documents[key] = tokens
        self.held_tokens += len(tokens)
        self.peak_tokens = max(self.peak_tokens, self.held_tokens)


class TokenServer:
    """Reads and tokenizes documents. Its methods are thread-safe.

    Args:
        paths: paths of the files, which ``file`` of a place indexes.
        key: key of the text in each line.
        longest: tokens of the longest sample (``--seq-length``).
        limit_tokens: largest number of tokens in the cache.
        build_encode: function that builds the function from text to tokens; called once.
    """

    def __init__(
        self, paths: Sequence[str], key: str, longest: int, limit_tokens: int, build_encode: Callable[[], Encode]
    ) -> None:
        self._paths = paths
        self._key = key
        self._longest = longest
        self._encode = build_encode()
        self._cache = TokenCache(limit_tokens)
        self._lock = threading.Lock()

    def index(self, file: int, start: int, stop: int) -> LineIndex:
        """Return the index of a byte range of a file; see ``index_lines``."""
        with self._lock:
            return index_lines(self._paths[file], start, stop, self._key, self._longest, self._encode)

    def lengths(self, places: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [n]. Tokenizes the documents, and caches them for ``read``.

        Raises:
            ValueError: a line is invalid, or the length of a document differs from its index.
        """
        ends = np.array([len(self._document(place)) for place in places], dtype=np.int64)
        lengths: np.ndarray = np.minimum(ends - places["start"], self._longest)
        return lengths

    def read(self, places: np.ndarray, ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens of all ranges end to end, [total]; number of tokens of each range, int64 [n]).

        The stop of a range may be one past the end of its sample, to include the next token of the document. At the end
        of the document that token is missing.

        Args:
            places: location of the sample of each range, ``PLACE`` [n].
            ranges: start and stop of each range in its sample, int64 [n, 2].
        """
        parts = [
            self._document(place)[int(place["start"]) + start : int(place["start"]) + stop]
            for place, (start, stop) in zip(places, ranges.tolist(), strict=True)
        ]
        return np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64)

    def held_tokens(self) -> tuple[int, int]:
        """Return (current, highest so far) number of tokens in the cache."""
        return self._cache.held_tokens, self._cache.peak_tokens

    def _document(self, place: np.void) -> np.ndarray:
        key = int(place["file"]), int(place["offset"])
        with self._lock:  # tokenizers are not thread-safe
            tokens = self._cache.get(key)
            if tokens is None:
                tokens = self._tokenize(place)
                self._cache.put(key, tokens)
        return tokens

    def _tokenize(self, place: np.void) -> np.ndarray:
        path, offset = self._paths[int(place["file"])], int(place["offset"])
        try:
            with open(path, "rb") as stream:
                stream.seek(offset)
                line = stream.read(int(place["num_bytes"]))
        except OSError as error:
            raise unreadable(path, error) from error
        text = text_of_line(path, offset, line, self._key)
        tokens = encode_text(path, offset, text, self._encode) if text else np.zeros(0, dtype=np.int64)
        if (place["is_counted"] and len(tokens) != place["tokens"]) or not len(tokens):
            raise ValueError(f"{path}: document {place['document']} has changed since the start: restart the run")
        if not place["is_counted"] and len(tokens) > self._longest:
            raise ValueError(
                f"{path}: document {place['document']} has {len(tokens)} tokens but fewer bytes, and "
                "--hdp-loader ray needs at least a byte for each token: write it with `bytescale corpus`, and use "
                "--hdp-loader local"
            )
        return tokens if tokens.dtype.itemsize <= 4 else tokens.astype(np.int32)
