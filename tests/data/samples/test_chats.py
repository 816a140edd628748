"""Conversations of a line, and masks of their answers, with hand-written tokenizers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.samples.chat_templates import TemplateEncoder
from bytescale_ext.data.samples.chats import IGNORED, Conversation, Encoded, MegatronEncoder, Message, conversations
from tests.data.chats import chat, message


def line(*messages: dict[str, str]) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


def test_a_system_message_begins_a_new_conversation() -> None:
    first, second = chat("a", "b", "c", "d"), chat("e", "f", system="s")
    parts = [Conversation(first), Conversation(second), Conversation(second)]
    assert conversations(line(*first, *second, *second), "f:1") == parts
    assert conversations(line(*first), "f:1") == parts[:1]
    assert conversations(b" \n", "f:1") == []
    with_tool = [message("user", "u"), message("tool", "t"), message("assistant", "a")]
    assert conversations(line(*with_tool), "f:1") == [Conversation(with_tool)]


def test_messages_and_tools_are_whole() -> None:
    messages: list[Message] = [
        {"role": "user", "name": "x", "content": [{"type": "text", "text": "u"}, "v"]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "7", "content": ""},
        {"role": "assistant", "content": "", "thinking": "t"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = {"id": 7, "messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    whole = Conversation(messages, {"tools": tools, "enable_thinking": False})
    assert conversations(json.dumps(given).encode(), "f:1") == [whole]
    as_text = {**given, "tools": json.dumps(tools)}
    assert conversations(json.dumps(as_text).encode(), "f:1") == [whole]


BAD = {
    "cut short": (b'{"messages": [{"role": "user", "con', "f:3: not JSON (.*): each line of a .jsonl file is one JSON"),
    "no messages": (b'{"text": "a"}', r"f:3: no list under the key 'messages' \(found: \['text'\]\): give chats"),
    "a list": (b"[1]", r"f:3: no list under the key 'messages' \(found: list\)"),
    "no message": (b'{"messages": []}', "f:3: no list under the key 'messages'"),
    "not a message": (b'{"messages": ["a"]}', "f:3: message 1 has no text under 'role'"),
    "no content": (b'{"messages": [{"role": "user", "content": null}]}', "f:3: message 1 has no text under"),
    "a number": (b'{"messages": [{"role": "user", "content": 5}]}', "f:3: message 1 has no text or list of parts"),
    "no tools": (b'{"messages": [{"role": "user", "content": "a"}], "tools": [5]}', "f:3: 'tools' is no list of objec"),
    "unknown role": (line(message("human", "a")), "f:3: message 1 has the role 'human': give one of system, developer"),
    "answer first": (line(message("assistant", "a")), "f:3: message 1 is an answer that follows no message of a user"),
    "answer twice": (line(*chat("a", "b"), message("assistant", "c")), "f:3: message 3 is an answer that follows no"),
    "answer to a system": (line(message("system", "a"), message("assistant", "c")), "f:3: message 2 is an answer"),
    "empty answer": (line(*chat("a", " \n")), "f:3: message 2 is an empty answer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_named(name: str) -> None:
    raw, expected = BAD[name]
    with pytest.raises(ValueError, match=expected) as error:
        conversations(raw, "f:3")
    assert "\n" not in str(error.value)


class Letters:
    """Fake of a transformers tokenizer. A token is two letters, or one letter at the end."""

    is_fast = True
    chat_template: str | None = "by hand"

    def apply_chat_template(self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        text = "".join(f"[{one['role'][0]}]{one['content']}." for one in conversation)
        return text + ("[a]" if add_generation_prompt else "")

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any:
        assert return_offsets_mapping
        assert not add_special_tokens
        starts = range(0, len(text), 2)
        return {"input_ids": [ord(text[i]) for i in starts], "offset_mapping": [(i, i + 2) for i in starts]}


def encoded(tokenizer: Any, messages: list[Message]) -> list[Encoded]:
    """Return the documents of a chat."""
    return TemplateEncoder(tokenizer)(Conversation(messages))


@pytest.mark.slow
def test_answers_are_what_a_template_writes_after_its_prompt() -> None:
    tokens, answers = encoded(Letters(), chat("hi", "yes", "so", "no!"))[0]
    text = "[u]hi.[a]yes.[u]so.[a]no!."
    assert tokens.tolist() == [ord(text[i]) for i in range(0, len(text), 2)]
    spans = [found.span(1) for found in re.finditer(r"\[a\](.*?\.)", text)]
    assert answers.tolist() == [any(a <= i < b for a, b in spans) for i in range(0, len(text), 2)]
    assert 0 < answers.sum() < len(answers)
    assert not encoded(Letters(), chat("hi"))[0][1].any()


def test_templates_that_hide_the_answers_are_refused() -> None:
    class Forgets(Letters):
        def apply_chat_template(
            self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool
        ) -> str:
            return super().apply_chat_template(
                conversation[-2:], tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )

    class Asks(Letters):
        def apply_chat_template(
            self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool
        ) -> str:
            text = super().apply_chat_template(conversation, tokenize=tokenize, add_generation_prompt=False)
            return text + "[?]" * add_generation_prompt

    shown = ["".join(map(chr, tokens)) for tokens, _ in encoded(Forgets(), chat("a1", "b2", "c3", "d4"))]
    assert shown == ["[]1[]2", "[]2[]3[]4"]  # every second letter of "[u]a1.[a]b2." and "[a]b2.[u]c3.[a]d4."
    with pytest.raises(ValueError, match=r"ends the prompt for message 2 with .* so the answer cannot be located"):
        encoded(Asks(), chat("a", "b"))
    without, slow = Letters(), Letters()
    without.chat_template, slow.is_fast = None, False
    with pytest.raises(ValueError, match="the tokenizer has no chat template: add one"):
        TemplateEncoder(without)
    with pytest.raises(ValueError, match="cannot say where its tokens are"):
        TemplateEncoder(slow)


class Megatrons:
    """Fake of Megatron's SFT tokenizer with given tokens and targets."""

    def __init__(self, targets: list[int], pad: int | None) -> None:
        self.targets, self.pad = targets, pad

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        assert return_target
        assert not add_generation_prompt
        assert conversation[0]["content"] != "odd", "expected turn tokens\n to match"
        return np.arange(len(self.targets)), np.array(self.targets)


def test_targets_of_megatrons_tokenizer() -> None:
    targets = [IGNORED, 5, 6, IGNORED, 9]
    tokens, answers = MegatronEncoder(Megatrons(targets, pad=6))(Conversation(chat("a")))[0]
    assert (tokens.tolist(), answers.tolist()) == ([0, 1, 2, 3, 4], [False, True, False, False, True])
    encode = MegatronEncoder(Megatrons(targets, pad=None))
    assert encode(Conversation(chat("a")))[0][1].tolist() == [False, True, True, False, True]
    assert encode.notes() == []
    encode(Conversation([{"role": "user", "content": [{"text": "a"}], "name": "n"}], {"tools": [{}]}))
    assert encode.notes() == ["WARNING: the prompt format does not write these keys of messages: name (1), tools (1)"]
    with pytest.raises(ValueError, match="the prompt format does not fit: expected turn tokens to match"):
        MegatronEncoder(Megatrons(targets, None))(Conversation(chat("odd")))


class Endless:
    """A tokenizer of Megatron's whose template never ends."""

    pad = None

    def tokenize_conversation(self, conversation: object, **_: object) -> tuple[np.ndarray, np.ndarray]:
        while True:
            pass


def test_templates_of_megatron_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt format "default" renders the chat template of the tokenizer's folder."""
    encode = MegatronEncoder(Endless())
    monkeypatch.setattr(encode._limited, "_limits", (0.2, 1 << 30))
    with pytest.raises(ValueError, match=r"^the chat template takes longer than 0\.2 s for one conversation$"):
        encode(Conversation(chat("a")))
