"""Writes conversations as a Megatron data set with weights of their tokens (``bytescale corpus --sft``)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from bytescale_ext.data.corpus.sidecar import (
    ADVANTAGES,
    GROUPS,
    HEADER,
    LOGPROBS,
    VALUES,
    WEIGHTS,
    Kind,
    advantages_of,
    groups_of,
    old_logprobs_of,
    weights_of,
    write_header,
)
from bytescale_ext.data.samples.chat_templates import TemplateEncoder
from bytescale_ext.data.samples.chats import (
    ChatEncoder,
    Conversation,
    Encoded,
    MegatronEncoder,
    conversations,
    text_of,
)
from bytescale_ext.data.samples.rollouts import ChatDocument, RolloutKeys, in_groups, with_fields
from bytescale_ext.data.samples.sources import Entry, raw_contents
from bytescale_ext.data.samples.template_limits import MOST_EXCEEDED, LimitExceededError
from bytescale_ext.data.samples.texts import Tokenizer, check_ids, json_weights
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import json_value
from bytescale_ext.new_file import new_file
from megatron.bytescale.core.datasets.corpus import (
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
        rollouts: keys of recorded rollouts, whose lines are in groups; None: lines are no rollouts.
    """

    weights: str | None = None
    are_pairs: bool = False
    skip_bad: bool = False
    rollouts: RolloutKeys | None = None

    @property
    def has_groups(self) -> bool:
        """Whether the documents are in groups."""
        return self.are_pairs or self.rollouts is not None

    def columns(self) -> list[Column]:
        """Return the sidecars to write."""
        dtype = "uint8" if self.weights is None else "float32"
        found = [Column(WEIGHTS, weights_of, dtype, lambda document, _: document.weights)]
        if self.has_groups:
            found.append(Column(GROUPS, groups_of, "int32", lambda _, group: np.array([group])))
        if self.rollouts is not None and (self.rollouts.rewards or self.rollouts.advantages):
            found.append(Column(ADVANTAGES, advantages_of, "float32", lambda document, _: document.advantages))
        if self.rollouts is not None and self.rollouts.logprobs:
            found.append(Column(LOGPROBS, old_logprobs_of, "float32", lambda document, _: document.logprobs))
        return found


@dataclass(frozen=True, slots=True)
class Column:
    """A sidecar that is written with a data set.

    Attributes:
        kind: its kind.
        path_of: function from a prefix to its path, without suffix.
        dtype: type of its numbers.
        numbers: function from a document and the number of its group to the document's numbers: [n].
    """

    kind: Kind
    path_of: Callable[[str], str]
    dtype: str
    numbers: Callable[[ChatDocument, int], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class ConversationSummary(CorpusSummary):
    """Counts of written and skipped conversations. ``num_skipped_empty`` counts records without a conversation.

    Attributes:
        notes: lines about the methods that found the answers, and about what chat templates left out.
        sidecars: suffixes of the sidecars' files.
        num_groups: number of groups; 0 without groups.
    """

    num_answer_tokens: int
    num_without_answer: int
    num_bad: int
    first_bad: str
    notes: list[str]
    sidecars: list[str]
    num_groups: int


@dataclass
class _Left:
    """Counters of answer tokens, groups and skipped conversations. ``exceeded``: by limits of chat templates."""

    answer_tokens: int = 0
    without_answer: int = 0
    groups: int = 0
    bad: int = 0
    first_bad: str = ""
    exceeded: int = 0

    def summary(self, documents: CorpusSummary, notes: list[str], sidecars: list[str]) -> ConversationSummary:
        """Return all counts; ``notes``, ``sidecars``: see ``ConversationSummary``."""
        return ConversationSummary(
            **dataclasses.asdict(documents),
            num_answer_tokens=self.answer_tokens,
            num_without_answer=self.without_answer,
            num_bad=self.bad,
            first_bad=self.first_bad,
            notes=notes,
            sidecars=sidecars,
            num_groups=self.groups,
        )


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
    """Write each conversation as a document to ``prefix``.bin and .idx, and sidecars next to them.

    The weights are a mask of the answers, or the number of a field for each token of an answer. Pairs and rollouts have
    groups too, and rollouts the advantages and log-probabilities that their lines have.

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
    tally, left, columns = DocumentTally(entries), _Left(), fields.columns()
    _check_lengths(fields, tally)
    suffixes = [column.path_of("") + end for column in columns for end in (VALUES, HEADER)]
    with whole_files(prefix, suffixes) as partial:
        builder = IndexedDatasetBuilder(partial + ".bin", dtype=dtype)
        try:
            with contextlib.ExitStack() as stack:
                paths = [column.path_of(partial) + VALUES for column in columns]
                files = [stack.enter_context(new_file(path, is_binary=True)) for path in paths]
                for group in _groups(entries, _Reading(encode, fields), tally, left):
                    for document in group:
                        check_ids(document.tokens, dtype, document.where)
                        builder.add_document(document.tokens, [len(document.tokens)])
                        _write_numbers(document, left.groups, columns, files)
                    tally.lengths += [len(document.tokens) for document in group]
                    left.groups += fields.has_groups
                    if num_tokens is not None and sum(tally.lengths) >= num_tokens:
                        break
        finally:
            builder.data_file.close()
        if not tally.lengths:
            reason = f" (the first bad line: {left.first_bad})" if left.bad else ""
            raise ValueError(f"{len(entries)} lines, and no conversation with an answer: nothing to write{reason}")
        builder.finalize(partial + ".idx")
        headers = [write_header(column.path_of(partial), partial, column.kind, column.dtype) for column in columns]
        left.answer_tokens = headers[0].num_nonzero
    summary = tally.summary(prefix, np.dtype(dtype).name, int(vocabulary.vocab_size), int(vocabulary.eod))
    return left.summary(summary, encode.notes(), suffixes)


def _write_numbers(document: ChatDocument, group: int, columns: Sequence[Column], files: Sequence[IO[bytes]]) -> None:
    """Write the numbers of a document of a group to the file of each sidecar."""
    for column, file in zip(columns, files, strict=True):
        file.write(np.asarray(column.numbers(document, group), dtype=column.dtype).tobytes())


def _check_lengths(fields: Fields, tally: DocumentTally) -> None:
    """Raise ValueError if records of groups are left out because they are too long."""
    if fields.rollouts is not None and tally.num_too_long:
        raise ValueError(f"{tally.num_too_long} records are too long, and their groups would lack them: shorten them")


@dataclass(frozen=True, slots=True)
class _Reading:
    """How lines become documents; see ``write_conversations``."""

    encode: ChatEncoder
    fields: Fields

    def documents(self, raw: bytes, where: str) -> tuple[int, list[ChatDocument]]:
        """Return the number of conversations of a line, and their documents. Raises ValueError for a bad line."""
        if self.fields.are_pairs:
            return self._pair(raw, where)
        chats = conversations(raw, where)
        encoded = [document for chat in chats for document in encode_at(where, self.encode, chat)]
        if self.fields.weights is not None and chats:
            (weight,) = json_weights(raw, self.fields.weights, where, 1)
            encoded = [(tokens, answers.astype(np.float32) * weight) for tokens, answers in encoded]
        documents = [ChatDocument(where, tokens, weights) for tokens, weights in encoded]
        if self.fields.rollouts is not None and chats:
            _check_single(documents, where, "a line of a group")
            documents = [with_fields(documents[0], json_value(raw, is_strict=True), self.fields.rollouts)]
        return len(chats), documents

    def _pair(self, raw: bytes, where: str) -> tuple[int, list[ChatDocument]]:
        """Return the documents of the preferred and of the other answer of a line. Raises ValueError for a bad pair."""
        if not raw.strip():
            return 0, []
        record = json_value(raw, is_strict=True)
        found, prompts = [], []
        for key in PAIR:
            if not isinstance(record, dict) or not isinstance(record.get(key), list):
                raise ValueError(f"{where}: no messages under the key {key!r}: a pair has 'chosen' and 'rejected'")
            line = json.dumps({**record, "messages": record[key]}).encode()
            chats = conversations(line, where)
            encoded = [document for chat in chats for document in encode_at(where, self.encode, chat)]
            documents = [ChatDocument(where, tokens, weights) for tokens, weights in encoded]
            _check_single(documents, where, "a pair", f" under {key!r}")
            prompts.append(_prompt_of(chats[0]))
            found += documents
        if prompts[0] != prompts[1]:
            raise ValueError(f"{where}: 'chosen' and 'rejected' differ before the first answer: a pair has one prompt")
        return 1, found


def _prompt_of(chat: Conversation) -> list[tuple[object, str]]:
    """Return the role and the text of each message before the first answer of a chat."""
    before = itertools.takewhile(lambda message: message["role"] != "assistant", chat.messages)
    return [(message["role"], text_of(message.get("content"))) for message in before]


def _check_single(documents: Sequence[ChatDocument], where: str, user: str, place: str = "") -> None:
    """Raise ValueError unless there is one document, with an answer after its first token."""
    num_answered = sum(bool(document.weights[1:].any()) for document in documents)
    if not len(documents) == num_answered == 1:
        raise ValueError(
            f"{where}: {len(documents)} documents{place}, {num_answered} of them with an answer: {user} needs one"
        )


def _groups(
    entries: Sequence[Entry], reading: _Reading, tally: DocumentTally, left: _Left
) -> Iterator[list[ChatDocument]]:
    """Yield the documents of each group; without groups, of each line. Raises ValueError for a bad line or group."""
    lines = _lines(entries, reading, tally, left)
    return lines if reading.fields.rollouts is None else in_groups(itertools.chain.from_iterable(lines))


def _lines(
    entries: Sequence[Entry], reading: _Reading, tally: DocumentTally, left: _Left
) -> Iterator[list[ChatDocument]]:
    """Yield the documents with an answer of each line. Raises ValueError for a bad line."""
    for entry, raw in raw_contents(entries):
        tally.files.add(entry.path)
        where = f"{entry.path}:{entry.line}"
        try:
            num_chats, documents = reading.documents(raw, where)
        except ValueError as error:
            if not reading.fields.skip_bad:
                raise
            left.exceeded += isinstance(error.__cause__, LimitExceededError)
            if left.exceeded == MOST_EXCEEDED:
                raise ValueError(f"{error}, and for {MOST_EXCEEDED - 1} others: change the template") from error
            left.bad += 1
            left.first_bad = left.first_bad or str(error)
            continue
        tally.num_skipped_empty += not num_chats
        answered = [document for document in documents if document.weights[1:].any()]  # the first is never a label
        left.without_answer += len(documents) - len(answered)
        if answered:
            yield answered


def encode_at(where: str, encode: ChatEncoder, chat: Conversation) -> list[Encoded]:
    """Return the documents of a conversation; a ValueError starts with ``where``."""
    try:
        return encode(chat)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # chat templates raise their own error types
        reason = one_line(error, 160) or type(error).__name__
        raise ValueError(f"{where}: the chat template refuses the conversation ({reason})") from error
