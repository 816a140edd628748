"""Conversations of a JSONL file, and their token ids with a mask of the answers by Megatron's SFT tokenizer.

A line is an object with the key ``messages``: a list of {"role", "content", ...}. As in Megatron's ``SFTDataset``, a
system message starts a new conversation, so a line may contain several conversations. Messages keep all their keys,
and a line may also have ``tools``, ``documents`` and ``chat_template_kwargs``, which chat templates read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from bytescale_ext.data.samples.template_limits import LimitedFunction
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import check_characters, json_value

Message = dict[str, object]
Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids [n] of a document, and the mask of its answers, bool [n]."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_TOOLS: Final = ("tool", "function", "ipython", "observation")
_ANSWERS: Final = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
IGNORED: Final = -100
"""Target of tokens that are not answers, as set by Megatron's SFT tokenizer."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the other values that a chat template reads.

    Attributes:
        messages: messages with all their keys.
        settings: arguments of the template, such as ``tools``.
    """

    messages: list[Message]
    settings: Mapping[str, object] = field(default_factory=dict)


class ChatEncoder(Protocol):
    """Function from a conversation to documents, which counts what a user should know."""

    def __call__(self, conversation: Conversation) -> list[Encoded]: ...

    def notes(self) -> list[str]:
        """Return one line for each kind of event since the encoder was made."""
        ...


class ConversationTokenizer(Protocol):
    """Interface of Megatron's SFT tokenizer, as far as it is used."""

    pad: int | None

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and targets, both [n]."""
        ...


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
        value = json_value(line, is_strict=True)
        check_characters(line, value)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}): each line of a .jsonl file is one JSON object") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        content = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{where}: no list under the key 'messages' (found: {content}): give chats of roles and contents"
        )
    settings = _settings(value, where)
    chats: list[list[Message]] = []
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        checked = _checked(message, place)
        if checked["role"] == "system" or not chats:
            chats.append([])
        _check_answer(checked, chats[-1], place)
        chats[-1].append(checked)
    return [Conversation(chat, settings) for chat in chats]


def _settings(value: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the arguments of the chat template in a line. Raises ValueError for arguments of a wrong type."""
    settings: dict[str, object] = {}
    for key in ("tools", "documents"):
        given = value.get(key)
        if isinstance(given, str):
            try:
                given = json_value(given or "null")
            except ValueError as error:
                raise ValueError(f"{where}: {key!r} is a text that is not JSON ({error})") from error
        if not isinstance(given, list | None) or not all(isinstance(entry, dict) for entry in given or []):
            raise ValueError(f"{where}: {key!r} is no list of objects")
        settings |= {key: given} if given else {}
    more = value.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError(f"{where}: 'chat_template_kwargs' is no object")
    return {**settings, **more}


def _checked(message: object, place: str) -> Message:
    """Return a message. Raises ValueError if it is no object, or has no known role or no suitable content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{place} has no text under 'role'")
    if message["role"] not in ROLES:
        raise ValueError(f"{place} has the role {message['role']!r}: give one of {', '.join(ROLES)}")
    content = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict | str) for part in content)
    if not isinstance(content, str | None) and not is_parts:
        raise ValueError(f"{place} has no text or list of parts under 'content'")
    if content is None and message["role"] != "assistant":
        raise ValueError(f"{place} has no text under 'content'")
    return message


def text_of(content: object) -> str:
    """Return the text of a message's content, which is a text, None, or a list of parts."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)


def _check_answer(message: Message, before: Sequence[Message], place: str) -> None:
    """Raise ValueError for an empty answer, or an answer that follows no message of a user or tool."""
    if message["role"] != "assistant":
        return
    if not before or before[-1]["role"] not in ("user", *_TOOLS):
        raise ValueError(f"{place} is an answer that follows no message of a user or tool")
    has_more = any(message.get(key) for key in _ANSWERS if key != "content")
    if not text_of(message.get("content")).strip() and not has_more:
        raise ValueError(f"{place} is an empty answer")


class MegatronEncoder:
    """Encodes conversations with Megatron's SFT tokenizer, which reads roles and texts alone.

    The mask selects the tokens on which Megatron's ``SFTDataset`` would train, without padding.
    """

    def __init__(self, tokenizer: ConversationTokenizer) -> None:
        self._tokenizer = tokenizer
        self._unwritten: dict[str, int] = {}
        # The prompt format "default" is the chat template of the tokenizer's folder.
        self._limited = LimitedFunction(self._tokens_and_targets)

    def __call__(self, conversation: Conversation) -> list[Encoded]:
        """Return one document. Raises ValueError if the prompt format does not fit."""
        for message in conversation.messages:
            for key in sorted(key for key in message if key not in ("role", "content") and message[key]):
                self._unwritten[key] = self._unwritten.get(key, 0) + 1
        if "tools" in conversation.settings:
            self._unwritten["tools"] = self._unwritten.get("tools", 0) + 1
        texts = [{"role": str(each["role"]), "content": text_of(each.get("content"))} for each in conversation.messages]
        tokens, targets = self._limited(texts)
        answers = targets != IGNORED
        if self._tokenizer.pad is not None:
            answers &= targets != self._tokenizer.pad
        return [(tokens, answers)]

    def _tokens_and_targets(self, texts: list[dict[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and targets of a conversation, each [tokens]."""
        try:
            tokens, targets = self._tokenizer.tokenize_conversation(
                texts, return_target=True, add_generation_prompt=False
            )
        except AssertionError as error:
            raise ValueError(f"the prompt format does not fit: {one_line(error, 120)}") from error
        return np.asarray(tokens, dtype=np.int64), np.asarray(targets)

    def notes(self) -> list[str]:
        """Return a line about keys that the prompt format does not write."""
        return unwritten_notes(self._unwritten, "prompt format")


def unwritten_notes(counts: Mapping[str, int], writer: str) -> list[str]:
    """Return a line about keys that are not written, [] without any; ``counts``: number of messages by key."""
    keys = ", ".join(f"{key} ({count:,})" for key, count in sorted(counts.items()))
    return [f"WARNING: the {writer} does not write these keys of messages: {keys}"] if counts else []
