"""Texts as tokens and back, by the tokenizer of a checkpoint."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

BYTES = 256


class Texts:
    """A tokenizer for generation; where training had the NullTokenizer, a token is a byte, as in `bytescale corpus`.

    Attributes:
        vocab: tokens are below it.
        end: token after which a text ends; None: none.
    """

    def __init__(self, args: Any) -> None:
        self._tokenizer: Any = None
        if args.tokenizer_type == "NullTokenizer":
            self.vocab, self.end = args.vocab_size, BYTES if args.vocab_size > BYTES else None
            return
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        self._tokenizer = build_tokenizer(args)
        self.vocab, self.end = self._tokenizer.vocab_size, getattr(self._tokenizer, "eod", None)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises ValueError for bytes outside the vocabulary."""
        if self._tokenizer is not None:
            return list(self._tokenizer.tokenize(text))
        found = list(text.encode())
        if found and max(found) >= self.vocab:
            raise ValueError(f"the prompt has the byte {max(found)}, and the vocabulary has {self.vocab} tokens")
        return found

    def stream(self, write: Callable[[str], None]) -> Callable[[Sequence[int]], None]:
        """Return a function that is given tokens one after another, and writes their text as soon as it is whole."""
        if self._tokenizer is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda tokens: write(decoder.decode(bytes(token for token in tokens if token < BYTES)))
        seen: list[int] = []
        written = 0

        def of_tokenizer(tokens: Sequence[int]) -> None:
            nonlocal written
            seen.extend(token for token in tokens if token != self.end)
            text = self._tokenizer.detokenize(seen)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                write(text[written:])
                written = len(text)

        return of_tokenizer
