"""Token ids of the text in a line of a JSONL file, for `bytescale corpus` and the remote loader."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from bytescale_ext.errors import one_line
from bytescale_ext.json_input import json_value

BYTE_LEVEL_EOD = 256
BYTE_LEVEL_VOCAB_SIZE = 257
LARGEST_WEIGHT = 1e30

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
        content = one_line(sorted(value), 200) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where}: no text under the key {key!r} (found: {content}): change --json-key")
    # JSON allows unpaired surrogates, UTF-8 does not.
    return str(value[key]).encode("utf-8", errors="surrogatepass")


def json_weights(line: bytes, key: str, where: str, num_tokens: int) -> np.ndarray:
    """Return the weights of the tokens of one line: float32 [num_tokens].

    Args:
        line: one line of the file.
        key: key of one number for all tokens, or of a list with a number for each token. The end-of-document token
            may be missing in the list; its weight is then 0.
        where: ``path:line``, for error messages.
        num_tokens: tokens of the document, with the end-of-document token.

    Raises:
        ValueError: the value is missing, no finite number, or a list of another length.
    """
    value = json_value(line, is_strict=True)
    found = value.get(key) if isinstance(value, dict) else None
    numbers = cast(list[float], found if isinstance(found, list) else [found])
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
        raise ValueError(f"{where}: no number and no list of numbers under the key {key!r}: change --weights")
    if not all(abs(one) <= LARGEST_WEIGHT for one in numbers):
        raise ValueError(f"{where}: a weight under the key {key!r} is above {LARGEST_WEIGHT:g}")
    weights = np.array(numbers, dtype=np.float32)
    if not isinstance(found, list):
        return np.full(num_tokens, weights[0], dtype=np.float32)
    if num_tokens - len(weights) not in (0, 1):
        raise ValueError(f"{where}: {len(weights)} weights under the key {key!r} for {num_tokens - 1} tokens")
    return np.append(weights, np.zeros(num_tokens - len(weights), dtype=np.float32))


def check_ids(tokens: np.ndarray, dtype: type[np.integer], where: str) -> None:
    """Raise ValueError for a token id, of [n], that a file of ids of type ``dtype`` cannot hold."""
    least, most = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if least < 0 or most > np.iinfo(dtype).max:
        raise ValueError(
            f"{where}: the tokenizer gives the token id {least if least < 0 else most}, and the file holds ids of type "
            f"{np.dtype(dtype).name}, which follows from the tokenizer's vocabulary size: correct its files"
        )


def encoder(tokenizer: Tokenizer | None) -> Encode:
    """Return a function from text bytes to (token ids [n] with the end-of-document id, whether the bytes are UTF-8).

    Without a tokenizer each byte is a token.
    """

    def as_bytes(raw: bytes) -> tuple[np.ndarray, bool]:
        tokens = np.full(len(raw) + 1, BYTE_LEVEL_EOD, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(raw, dtype=np.uint8)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            return tokens, False
        return tokens, True

    def by_tokenizer(raw: bytes) -> tuple[np.ndarray, bool]:
        assert tokenizer is not None
        text = raw.decode("utf-8", errors="replace")
        is_utf8 = "\ufffd" not in text or text.encode("utf-8") == raw
        return np.array([*tokenizer.tokenize(text), tokenizer.eod], dtype=np.int64), is_utf8

    return as_bytes if tokenizer is None else by_tokenizer


def refuse_code_of_folders() -> None:
    """Make transformers raise ValueError where it would ask on standard input whether to run a folder's code.

    It asks unless ``trust_remote_code`` is given, which Megatron's SFTTokenizer does not pass on.
    """
    if importlib.util.find_spec("transformers") is not None:
        from transformers import dynamic_module_utils

        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
