"""Conversations of a JSONL file, and their token ids with a mask of the answers.

A line is an object with the key ``messages``: a list of {"role", "content"}. As in Megatron's ``SFTDataset``, a system
message starts a new conversation, so a line may contain several conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypedDict

import numpy as np

from bytescale_ext.json_input import json_value

Conversation = list[dict[str, str]]
EncodeChat = Callable[[Conversation], tuple[np.ndarray, np.ndarray]]
ROLES: Final = ("system", "user", "assistant", "tool")
IGNORED: Final = -100
"""Target of tokens that are not answers, as set by Megatron's SFT tokenizer."""


class ConversationTokenizer(Protocol):
    """Interface of Megatron's SFT tokenizer, as far as it is used."""

    pad: int | None

    def tokenize_conversation(
        self, conversation: Conversation, return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and targets, both [n]."""
        ...


class EncodedText(TypedDict):
    """Token ids of a text, and the character range [start, stop) of each token."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


class TemplateTokenizer(Protocol):
    """Interface of a tokenizer of the transformers library, as far as it is used."""

    is_fast: bool
    chat_template: str | None

    def apply_chat_template(
        self, conversation: Conversation, *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> EncodedText: ...


def conversations(line: bytes, where: str) -> list[Conversation]:
    """Return the conversations of one line, [] for a blank line.

    Args:
        line: one line of the file.
        where: ``path:line``, for error messages.

    Raises:
        ValueError: the line is not JSON or has no messages, or a message is unsuitable for training.
    """
    if not line.strip():
        return []
    try:
        value = json_value(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}): each line of a .jsonl file is one JSON object") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        content = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{where}: no list under the key 'messages' (found: {content}): give chats of roles and contents"
        )
    chats: list[Conversation] = []
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{place} has no text under 'role' and 'content'")
        if message["role"] not in ROLES:
            raise ValueError(f"{place} has the role {message['role']!r}: give one of {', '.join(ROLES)}")
        if message["role"] == "system" or not chats:
            chats.append([])
        _check_answer(message, chats[-1], place)
        chats[-1].append({"role": message["role"], "content": message["content"]})
    return chats


def _check_answer(message: dict[str, str], before: Conversation, place: str) -> None:
    """Raise ValueError for an empty answer, or an answer that follows no user or tool message."""
    if message["role"] != "assistant":
        return
    if not before or before[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"{place} is an answer that follows no message of a user or tool")
    if not message["content"].strip():
        raise ValueError(f"{place} is an empty answer")


def encode_by_megatron(tokenizer: ConversationTokenizer) -> EncodeChat:
    """Return a function from a conversation to (token ids [n], mask of answers, bool [n]).

    The mask selects the tokens on which Megatron's ``SFTDataset`` would train, without padding.
    """

    def encode(conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        try:
            tokens, targets = tokenizer.tokenize_conversation(
                conversation, return_target=True, add_generation_prompt=False
            )
        except AssertionError as error:
            raise ValueError(f"the prompt format does not fit: {' '.join(str(error).split())[:120]}") from error
        answers = targets != IGNORED
        if tokenizer.pad is not None:
            answers &= targets != tokenizer.pad
        return np.asarray(tokens, dtype=np.int64), answers

    return encode


def encode_by_template(tokenizer: TemplateTokenizer) -> EncodeChat:
    """Return a function from a conversation to (token ids [n], mask of answers, bool [n]).

    An answer is the text that the tokenizer's chat template writes after the prompt, including its end mark.

    Raises:
        ValueError: the tokenizer has no chat template, or cannot map tokens to characters.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: add one to its tokenizer_config.json, or use SFTTokenizer"
        )
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer cannot say where its tokens are in a text: give one with a tokenizer.json")

    def render(messages: Conversation, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def encode(conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        text = render(conversation, False)
        spans = []
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                prompt, answer = render(conversation[:turn], True), render(conversation[: turn + 1], False)
                if not (text.startswith(answer) and answer.startswith(prompt)):
                    raise ValueError(
                        "the chat template rewrites earlier messages, so answers cannot be located: use another "
                        "template, or split the conversation after each answer"
                    )
                spans.append((len(prompt), len(answer)))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        return np.array(encoded["input_ids"], dtype=np.int64), _inside(starts, spans)

    return encode


def _inside(starts: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return whether each of ``starts``, [n], is inside a span [start, stop): bool [n]."""
    inside = np.zeros(len(starts), dtype=bool)
    for start, stop in spans:
        inside |= (starts >= start) & (starts < stop)
    return inside
