"""Token ids of the text in a line of a JSONL file, for `bytescale corpus` and the remote loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from bytescale_ext.json_input import json_value

BYTE_LEVEL_EOD = 256
BYTE_LEVEL_VOCAB_SIZE = 257

Encode = Callable[[bytes], tuple[np.ndarray, bool]]


class Tokenizer(Protocol):
    """Interface of a Megatron tokenizer, as far as it is used."""

    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]: ...


def json_text(line: bytes, key: str, where: str) -> bytes:
    """Return the text under ``key`` of one line as UTF-8, or b"" for a blank line.

    Args:
        line: one line of the file, with or without its end.
        key: key of the text.
        where: ``path:line``, for error messages.

    Raises:
        ValueError: the line is not JSON, or has no text under ``key``.
    """
    if not line.strip():
        return b""
    try:
        value = json_value(line, is_strict=True)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}): each line of a .jsonl file is one JSON object") from error
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            raise ValueError(f"{where}: a chat under the key 'messages': join its messages to one text under {key!r}")
        content = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where}: no text under the key {key!r} (found: {content}): change --json-key")
    # JSON allows unpaired surrogates, UTF-8 does not.
    return str(value[key]).encode("utf-8", errors="surrogatepass")


def encoder(tokenizer: Tokenizer | None) -> Encode:
    """Return a function from text bytes to (token ids [n] with the end-of-document id, whether the bytes are UTF-8).

    Without a tokenizer each byte is a token.
    """

    def as_bytes(raw: bytes) -> tuple[np.ndarray, bool]:
        tokens = np.full(len(raw) + 1, BYTE_LEVEL_EOD, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(raw, dtype=np.uint8)
        return tokens, True

    def by_tokenizer(raw: bytes) -> tuple[np.ndarray, bool]:
        assert tokenizer is not None
        text = raw.decode("utf-8", errors="replace")
        is_utf8 = "\ufffd" not in text or text.encode("utf-8") == raw
        return np.array([*tokenizer.tokenize(text), tokenizer.eod], dtype=np.int64), is_utf8

    return as_bytes if tokenizer is None else by_tokenizer
