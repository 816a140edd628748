"""Writes conversations as a Megatron data set with weights of their tokens (``bytescale corpus --sft``)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from bytescale_ext.data.corpus.sidecar import VALUES, WEIGHTS, weights_of, write_header
from bytescale_ext.data.samples.chat_templates import TemplateEncoder
from bytescale_ext.data.samples.chats import ChatEncoder, Conversation, Encoded, MegatronEncoder, conversations
from bytescale_ext.data.samples.sources import Entry, raw_contents
from bytescale_ext.data.samples.texts import Tokenizer, check_ids, json_weights
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import json_value
from bytescale_ext.new_file import new_file
from megatron.bytescale.core.datasets.corpus import (
    WEIGHT_FILES,
    CorpusSummary,
    DocumentTally,
    build_megatron_tokenizer,
    whole_files,
)

KINDS = ("SFTTokenizer", "HuggingFaceTokenizer")


PAIR = ("chosen", "rejected")
"""Keys of the messages of a pair of answers."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Further fields of a line, and the handling of bad lines.

    Attributes:
        weights: key of the weight of a line's answers; None: 1.
        are_pairs: whether lines hold pairs of answers, which become two documents.
        skip_bad: whether bad lines are skipped and counted instead of failing.
    """

    weights: str | None = None
    are_pairs: bool = False
    skip_bad: bool = False


@dataclass(frozen=True, slots=True)
class ConversationSummary(CorpusSummary):
    """Counts of written and skipped conversations. ``num_skipped_empty`` counts blank lines.

    Attributes:
        notes: lines about the methods that found the answers, and about what chat templates left out.
    """

    num_answer_tokens: int
    num_without_answer: int
    num_bad: int
    first_bad: str
    notes: list[str]


@dataclass
class _Left:
    """Counters of answer tokens and of skipped conversations."""

    answer_tokens: int = 0
    without_answer: int = 0
    bad: int = 0
    first_bad: str = ""


def chat_tokenizer(settings: dict[str, Any]) -> tuple[Tokenizer, ChatEncoder]:
    """Return a tokenizer built by Megatron, and the function that encodes conversations with it.

    ``settings``: fields of Megatron's ``TokenizerConfig``.

    Raises:
        ValueError: the tokenizer cannot be built, or does not support chats.
    """
    kind, model = settings.get("tokenizer_type"), settings.get("tokenizer_model")
    if kind not in KINDS:
        raise ValueError(f"--sft needs --tokenizer-type {' or '.join(KINDS)}, which know how chats are written")
    tokenizer: Any = build_megatron_tokenizer(settings)
    if kind == KINDS[0]:
        if (
            settings.get("sft_tokenizer_prompt_format") == "default"
            and not tokenizer._tokenizer._tokenizer.chat_template
        ):
            raise ValueError(f"--tokenizer-model {model}: the tokenizer has no chat template, which 'default' takes")
        return tokenizer, MegatronEncoder(tokenizer)
    try:
        return tokenizer, TemplateEncoder(tokenizer._tokenizer.tokenizer)
    except ValueError as error:
        raise ValueError(f"--tokenizer-model {model}: {error}") from error


def write_conversations(
    prefix: str,
    entries: Sequence[Entry],
    tokenizer: tuple[Tokenizer, ChatEncoder],
    *,
    num_tokens: int | None = None,
    seed: int = 1234,
    fields: Fields = Fields(),
) -> ConversationSummary:
    """Write each conversation as a document to ``prefix``.bin and .idx, and weights of its tokens next to them.

    The weights are a mask of the answers, or the number of a field for each token of an answer.

    The files get their final names only when all are complete. Conversations without an answer are skipped and counted.

    Args:
        prefix, num_tokens, seed: see ``write_corpus``.
        entries: lines of JSONL files.
        tokenizer: the result of ``chat_tokenizer``.
        fields: further fields of a line, and the handling of bad lines.

    Raises:
        ValueError: the folder cannot be written, a line is bad, or no conversation has an answer.
    """
    if num_tokens is not None:
        entries = [entries[i] for i in np.random.RandomState(seed).permutation(len(entries)).tolist()]
    vocabulary, encode = tokenizer
    dtype = DType.optimal_dtype(int(vocabulary.vocab_size))
    tally, left = DocumentTally(entries), _Left()
    kind = np.uint8 if fields.weights is None else np.float32
    with whole_files(prefix, WEIGHT_FILES) as partial:
        builder = IndexedDatasetBuilder(partial + ".bin", dtype=dtype)
        try:
            with new_file(weights_of(partial) + VALUES, is_binary=True) as file:
                for tokens, weights in _encoded(entries, _Reading(encode, fields), tally, left):
                    check_ids(tokens, dtype, prefix)
                    builder.add_document(tokens, [len(tokens)])
                    file.write(weights.astype(kind).tobytes())
                    if num_tokens is not None and sum(tally.lengths) >= num_tokens:
                        break
        finally:
            builder.data_file.close()
        if not tally.lengths:
            reason = f" (the first bad line: {left.first_bad})" if left.bad else ""
            raise ValueError(f"{len(entries)} lines, and no conversation with an answer: nothing to write{reason}")
        builder.finalize(partial + ".idx")
        header = write_header(weights_of(partial), partial, WEIGHTS, np.dtype(kind).name, 1 + fields.are_pairs)
        left.answer_tokens = header.num_nonzero
    summary = tally.summary(prefix, np.dtype(dtype).name, int(vocabulary.vocab_size), int(vocabulary.eod))
    return ConversationSummary(
        **dataclasses.asdict(summary),
        num_answer_tokens=left.answer_tokens,
        num_without_answer=left.without_answer,
        num_bad=left.bad,
        first_bad=left.first_bad,
        notes=encode.notes(),
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """How lines become documents; see ``write_conversations``."""

    encode: ChatEncoder
    fields: Fields

    def documents(self, raw: bytes, where: str) -> tuple[int, list[Encoded]]:
        """Return the number of conversations of a line, and their (token ids [n], weights [n])."""
        if self.fields.are_pairs:
            return self._pair(raw, where)
        chats = conversations(raw, where)
        encoded = [document for chat in chats for document in encode_at(where, self.encode, chat)]
        if self.fields.weights is None or not chats:
            return len(chats), encoded
        (weight,) = json_weights(raw, self.fields.weights, where, 1)
        return len(chats), [(tokens, answers.astype(np.float32) * weight) for tokens, answers in encoded]

    def _pair(self, raw: bytes, where: str) -> tuple[int, list[Encoded]]:
        """Return the documents of the preferred and of the other answer of a line. Raises ValueError for a bad pair."""
        if not raw.strip():
            return 0, []
        record = json_value(raw, is_strict=True)
        found = []
        for key in PAIR:
            if not isinstance(record, dict) or not isinstance(record.get(key), list):
                raise ValueError(f"{where}: no messages under the key {key!r}: a pair has 'chosen' and 'rejected'")
            line = json.dumps({**record, "messages": record[key]}).encode()
            chats = conversations(line, where)
            encoded = [document for chat in chats for document in encode_at(where, self.encode, chat)]
            if len(encoded) != 1 or not encoded[0][1][1:].any():
                raise ValueError(f"{where}: {len(encoded)} documents with answers under {key!r}: a pair needs one")
            found += encoded
        return 1, found


def _encoded(
    entries: Sequence[Entry], reading: _Reading, tally: DocumentTally, left: _Left
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (token ids [n], weights [n]) of each conversation with an answer. Raises ValueError for a bad line."""
    for entry, raw in raw_contents(entries):
        tally.files.add(entry.path)
        where = f"{entry.path}:{entry.line}"
        try:
            num_chats, documents = reading.documents(raw, where)
        except ValueError as error:
            if not reading.fields.skip_bad:
                raise
            left.bad += 1
            left.first_bad = left.first_bad or str(error)
            continue
        tally.num_skipped_empty += not num_chats
        for tokens, weights in documents:
            if not weights[1:].any():  # the first token is never a label
                left.without_answer += 1
                continue
            tally.lengths.append(len(tokens))
            yield tokens, weights


def encode_at(where: str, encode: ChatEncoder, chat: Conversation) -> list[Encoded]:
    """Return the documents of a conversation; a ValueError starts with ``where``."""
    try:
        return encode(chat)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # chat templates raise their own error types
        reason = one_line(error, 160)
        raise ValueError(f"{where}: the chat template refuses the conversation ({reason})") from error
