"""Conversion of texts to tokens and back with the tokenizer of a checkpoint, and output in the order of prompts."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Callable, Sequence
from typing import Any

from bytescale_ext.data.samples.texts import refuse_code_of_folders
from bytescale_ext.errors import one_line

BYTES = 256
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character, perhaps not yet
Take = Callable[[Sequence[int], bool], None]
"""Receives tokens of a text, and whether the text ends with them."""


class Texts:
    """A tokenizer for generation. With the NullTokenizer of a training, a token is a byte, as in `bytescale corpus`.

    A tokenizer's folder runs no code of its own, whatever the checkpoint says, unless ``trusts_code`` is set.

    Attributes:
        folder: tokenizer that the arguments name; empty for the NullTokenizer.
        vocab: size of the vocabulary.
        end: token that ends a text; None if there is none.
    """

    def __init__(self, args: argparse.Namespace, trusts_code: bool = False) -> None:
        """Make the tokenizer of training arguments. Raises ValueError if Megatron cannot."""
        self._tokenizer: Any = None
        self.folder = ""
        if args.tokenizer_type == "NullTokenizer":
            self.vocab, self.end = args.vocab_size, BYTES if args.vocab_size > BYTES else None
            return
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        options = argparse.Namespace(**{**vars(args), "trust_remote_code": trusts_code})
        refuse_code_of_folders()
        try:
            self._tokenizer = build_tokenizer(options)
        except Exception as error:  # each library of tokenizers raises errors of its own
            reason = f"cannot be read: {one_line(error)[-200:]}"
            if "trust_remote_code" in str(error):
                reason = "runs Python code: --trust-remote-code"
            name = getattr(args, "tokenizer_model", None)
            raise ValueError(f"the tokenizer {name!r} of the checkpoint {reason}") from None
        self.folder = str(getattr(args, "tokenizer_model", None) or args.tokenizer_type)
        self.vocab, self.end = self._tokenizer.vocab_size, getattr(self._tokenizer, "eod", None)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises ValueError for bytes outside the vocabulary."""
        if self._tokenizer is not None:
            return list(self._tokenizer.tokenize(text))
        tokens = list(text.encode())
        if tokens and max(tokens) >= self.vocab:
            raise ValueError(f"the prompt has the byte {max(tokens)}, and the vocabulary has {self.vocab} tokens")
        return tokens

    def stream(self, write: Callable[[str], None]) -> Take:
        """Return a function that receives tokens and writes their text as soon as its characters are complete.

        The last call writes the whole rest of the text, with U+FFFD for an unfinished character.
        """
        if self._tokenizer is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda tokens, is_last: write(
                decoder.decode(bytes(token for token in tokens if token < BYTES), is_last)
            )
        received: list[int] = []
        written = 0

        def of_tokenizer(tokens: Sequence[int], is_last: bool) -> None:
            nonlocal written
            received.extend(token for token in tokens if token != self.end)
            text = self._tokenizer.detokenize(received)
            whole = text if is_last else text.rstrip(REPLACEMENT)
            write(whole[written:])
            written = max(written, len(whole))

        return of_tokenizer


class InOrder:
    """Writes texts that grow together in the order of their prompts: the first unfinished text as it grows."""

    def __init__(
        self, count: int, stream: Callable[[Callable[[str], None]], Take],
        write: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Make the writer.

        Args:
            count: number of texts.
            stream: makes a function that receives tokens from a function that receives text.
            write: receives the text of all prompts in order.
        """
        self._write = write
        self._waiting: list[list[str]] = [[] for _ in range(count)]  # the unwritten parts of each text
        self._ended = [False] * count
        self._current = 0
        self._streams = [stream(part.append) for part in self._waiting]

    def add(self, index: int, tokens: Sequence[int], last_line: str | None) -> None:
        """Add tokens to a text. ``last_line`` is the last line of a text that has ended, else None."""
        if tokens or last_line is not None:
            self._streams[index](tokens, last_line is not None)
        if last_line is not None:
            self._waiting[index].append(f"{last_line}\n")
            self._ended[index] = True
        while self._current < len(self._waiting):
            part = self._waiting[self._current]
            if text := "".join(part):
                self._write(text)
            part.clear()
            if not self._ended[self._current]:
                return
            self._current += 1
