"""Writes conversations as a Megatron data set with a mask of their answers (``bytescale corpus --sft``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from bytescale_ext.data.corpus.mask_file import HEADER, MASK, write_header
from bytescale_ext.data.samples.chat_templates import TemplateEncoder
from bytescale_ext.data.samples.chats import ChatEncoder, Conversation, Encoded, MegatronEncoder, conversations
from bytescale_ext.data.samples.sources import Entry, raw_contents
from bytescale_ext.data.samples.texts import Tokenizer
from bytescale_ext.errors import one_line
from bytescale_ext.new_file import new_file
from megatron.bytescale.core.datasets.corpus import CorpusSummary, DocumentTally, build_megatron_tokenizer, whole_files

KINDS = ("SFTTokenizer", "HuggingFaceTokenizer")


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
    skip_bad: bool = False,
    num_tokens: int | None = None,
    seed: int = 1234,
) -> ConversationSummary:
    """Write each conversation as a document to ``prefix``.bin and .idx, and a mask of its answers next to them.

    The files get their final names only when all are complete. Conversations without an answer are skipped and counted.

    Args:
        prefix, num_tokens, seed: see ``write_corpus``.
        entries: lines of JSONL files.
        tokenizer: the result of ``chat_tokenizer``.
        skip_bad: skip and count bad lines instead of failing.

    Raises:
        ValueError: the folder cannot be written, a line is bad, or no conversation has an answer.
    """
    if num_tokens is not None:
        entries = [entries[i] for i in np.random.RandomState(seed).permutation(len(entries)).tolist()]
    vocabulary, encode = tokenizer
    dtype = DType.optimal_dtype(int(vocabulary.vocab_size))
    tally, left = DocumentTally(), _Left()
    with whole_files(prefix, (MASK, HEADER)) as partial:
        builder = IndexedDatasetBuilder(partial + ".bin", dtype=dtype)
        try:
            with new_file(partial + MASK, is_binary=True) as masks:
                for tokens, answers in _encoded(entries, encode, skip_bad, tally, left):
                    _add(builder, masks, tokens, answers)
                    if num_tokens is not None and sum(tally.lengths) >= num_tokens:
                        break
        finally:
            builder.data_file.close()
        if not tally.lengths:
            reason = f" (the first bad line: {left.first_bad})" if left.bad else ""
            raise ValueError(f"{len(entries)} lines, and no conversation with an answer: nothing to write{reason}")
        builder.finalize(partial + ".idx")
        left.answer_tokens = write_header(partial).num_answer_tokens
    summary = tally.summary(prefix, np.dtype(dtype).name, int(vocabulary.vocab_size), int(vocabulary.eod))
    return ConversationSummary(
        **dataclasses.asdict(summary),
        num_answer_tokens=left.answer_tokens,
        num_without_answer=left.without_answer,
        num_bad=left.bad,
        first_bad=left.first_bad,
        notes=encode.notes(),
    )


def _add(builder: IndexedDatasetBuilder, masks: IO[bytes], tokens: np.ndarray, answers: np.ndarray) -> None:
    """Append a document, and one mask byte for each of its tokens; both arrays are [n]."""
    builder.add_document(tokens, [len(tokens)])
    masks.write(answers.astype(np.uint8).tobytes())


def _encoded(
    entries: Sequence[Entry], encode: ChatEncoder, skip_bad: bool, tally: DocumentTally, left: _Left
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (token ids [n], answer mask [n]) of each conversation with an answer. Raises ValueError for a bad line."""
    for entry, raw in raw_contents(entries):
        tally.files.add(entry.path)
        where = f"{entry.path}:{entry.line}"
        try:
            chats = conversations(raw, where)
            documents = [document for chat in chats for document in encode_at(where, encode, chat)]
        except ValueError as error:
            if not skip_bad:
                raise
            left.bad += 1
            left.first_bad = left.first_bad or str(error)
            continue
        tally.num_skipped_empty += not chats
        for tokens, answers in documents:
            if not answers[1:].any():  # the first token is never a label
                left.without_answer += 1
                continue
            tally.lengths.append(len(tokens))
            yield tokens, answers


def encode_at(where: str, encode: ChatEncoder, chat: Conversation) -> list[Encoded]:
    """Return the documents of a conversation; a ValueError starts with ``where``."""
    try:
        return encode(chat)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # chat templates raise their own error types
        reason = one_line(error, 160)
        raise ValueError(f"{where}: the chat template refuses the conversation ({reason})") from error
