"""Conversations of a JSONL file, and their token ids with a mask of the answers. No Megatron.

A line is an object with the key ``messages``: a list of {"role", "content"}. As in Megatron's ``SFTDataset``, a system
message begins a new conversation, so a line may hold several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypedDict

import numpy as np

Conversation = list[dict[str, str]]
EncodeChat = Callable[[Conversation], tuple[np.ndarray, np.ndarray]]
ROLES: Final = ("system", "user", "assistant", "tool")
IGNORED: Final = -100
"""The target with which Megatron's SFT tokenizer marks tokens that are no answers."""


class ConversationTokenizer(Protocol):
    """The part of Megatron's SFT tokenizer that is used here."""

    pad: int | None

    def tokenize_conversation(
        self, conversation: Conversation, return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and targets, both [n]."""
        ...


class EncodedText(TypedDict):
    """Token ids of a text, and the characters [first, end) of each."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


class TemplateTokenizer(Protocol):
    """The part of a tokenizer of transformers that is used here."""

    is_fast: bool
    chat_template: str | None

    def apply_chat_template(
        self, conversation: Conversation, *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> EncodedText: ...


def conversations(line: bytes, where: str) -> list[Conversation]:
    """Return the conversations of one line; none for a blank line.

    Raises:
        ValueError: the line is not JSON, has no messages, or a message is not one that can be trained on; the error
            begins with ``where``, its ``path:line``.
    """
    if not line.strip():
        return []
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}): each line of a .jsonl file is one JSON object") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{where}: no list under the key 'messages' (found: {found}): give chats of roles and contents"
        )
    found_all: list[Conversation] = []
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{place} has no text under 'role' and 'content'")
        if message["role"] not in ROLES:
            raise ValueError(f"{place} has the role {message['role']!r}: give one of {', '.join(ROLES)}")
        if message["role"] == "system" or not found_all:
            found_all.append([])
        _check_answer(message, found_all[-1], place)
        found_all[-1].append({"role": message["role"], "content": message["content"]})
    return found_all


def _check_answer(message: dict[str, str], before: Conversation, place: str) -> None:
    """Raise ValueError for an answer to nothing, or an empty one."""
    if message["role"] != "assistant":
        return
    if not before or before[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"{place} is an answer that follows no message of a user or tool")
    if not message["content"].strip():
        raise ValueError(f"{place} is an empty answer")


def encode_by_megatron(tokenizer: ConversationTokenizer) -> EncodeChat:
    """Return a function from a conversation to (token ids [n], whether each is an answer, bool [n]).

    It marks what Megatron's ``SFTDataset`` would train on with this tokenizer: padding inside is left out.
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
    """Return a function from a conversation to (token ids [n], whether each is an answer, bool [n]).

    An answer is what the tokenizer's chat template writes after the prompt for it, end mark included.

    Raises:
        ValueError: the tokenizer has no chat template, or does not know where in the text its tokens are.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: add one to its tokenizer_config.json, or use SFTTokenizer"
        )
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer cannot say where its tokens are in a text: give one with a tokenizer.json")

    def written(messages: Conversation, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def encode(conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        text = written(conversation, False)
        spans = []
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                prompt, answer = written(conversation[:turn], True), written(conversation[: turn + 1], False)
                if not (text.startswith(answer) and answer.startswith(prompt)):
                    raise ValueError(
                        "the chat template writes earlier messages anew, so answers cannot be found: use another "
                        "template, or cut the conversation after each answer"
                    )
                spans.append((len(prompt), len(answer)))
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in found["offset_mapping"]], dtype=np.int64)
        return np.array(found["input_ids"], dtype=np.int64), _inside(starts, spans)

    return encode


def _inside(starts: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return whether each of ``starts`` [n] lies in one of the spans: bool [n]."""
    inside = np.zeros(len(starts), dtype=bool)
    for first, end in spans:
        inside |= (starts >= first) & (starts < end)
    return inside
