"""Conversations of a line, and masks of their answers, with hand-written tokenizers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.samples.chats import (
    IGNORED,
    Conversation,
    conversations,
    encode_by_megatron,
    encode_by_template,
)
from tests.data.chats import chat, message


def line(*messages: dict[str, str]) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


def test_a_system_message_begins_a_new_conversation() -> None:
    first, second = chat("a", "b", "c", "d"), chat("e", "f", system="s")
    assert conversations(line(*first, *second, *second), "f:1") == [first, second, second]
    assert conversations(line(*first), "f:1") == [first]
    assert conversations(b" \n", "f:1") == []
    extra = json.dumps({"id": 7, "messages": [{**one, "name": "x"} for one in first]}).encode()
    assert conversations(extra, "f:1") == [first]
    with_tool = [message("user", "u"), message("tool", "t"), message("assistant", "a")]
    assert conversations(line(*with_tool), "f:1") == [with_tool]


BAD = {
    "cut short": (b'{"messages": [{"role": "user", "con', "f:3: not JSON (.*): each line of a .jsonl file is one JSON"),
    "no messages": (b'{"text": "a"}', r"f:3: no list under the key 'messages' \(found: \['text'\]\): give chats"),
    "a list": (b"[1]", r"f:3: no list under the key 'messages' \(found: list\)"),
    "no message": (b'{"messages": []}', "f:3: no list under the key 'messages'"),
    "not a message": (b'{"messages": ["a"]}', "f:3: message 1 has no text under 'role' and 'content'"),
    "no content": (b'{"messages": [{"role": "user", "content": null}]}', "f:3: message 1 has no text under"),
    "unknown role": (line(message("human", "a")), "f:3: message 1 has the role 'human': give one of system, user, as"),
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

    def apply_chat_template(self, conversation: Conversation, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        text = "".join(f"[{one['role'][0]}]{one['content']}." for one in conversation)
        return text + ("[a]" if add_generation_prompt else "")

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any:
        assert return_offsets_mapping
        assert not add_special_tokens
        starts = range(0, len(text), 2)
        return {"input_ids": [ord(text[i]) for i in starts], "offset_mapping": [(i, i + 2) for i in starts]}


def test_answers_are_what_a_template_writes_after_its_prompt() -> None:
    encode = encode_by_template(Letters())
    tokens, answers = encode(chat("hi", "yes", "so", "no!"))
    text = "[u]hi.[a]yes.[u]so.[a]no!."
    assert tokens.tolist() == [ord(text[i]) for i in range(0, len(text), 2)]
    spans = [found.span(1) for found in re.finditer(r"\[a\](.*?\.)", text)]
    assert answers.tolist() == [any(a <= i < b for a, b in spans) for i in range(0, len(text), 2)]
    assert 0 < answers.sum() < len(answers)
    assert not encode(chat("hi"))[1].any()


def test_templates_that_hide_the_answers_are_refused() -> None:
    class Forgets(Letters):
        def apply_chat_template(
            self, conversation: Conversation, *, tokenize: bool, add_generation_prompt: bool
        ) -> str:
            return super().apply_chat_template(
                conversation[-2:], tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )

    with pytest.raises(ValueError, match="the chat template rewrites earlier messages"):
        encode_by_template(Forgets())(chat("a", "b", "c", "d"))
    assert encode_by_template(Forgets())(chat("a", "b"))[1].any()
    without, slow = Letters(), Letters()
    without.chat_template, slow.is_fast = None, False
    with pytest.raises(ValueError, match="the tokenizer has no chat template: add one"):
        encode_by_template(without)
    with pytest.raises(ValueError, match="cannot say where its tokens are"):
        encode_by_template(slow)


class Megatrons:
    """Fake of Megatron's SFT tokenizer with given tokens and targets."""

    def __init__(self, targets: list[int], pad: int | None) -> None:
        self.targets, self.pad = targets, pad

    def tokenize_conversation(
        self, conversation: Conversation, return_target: bool, add_generation_prompt: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        assert return_target
        assert not add_generation_prompt
        assert conversation[0]["content"] != "odd", "expected turn tokens\n to match"
        return np.arange(len(self.targets)), np.array(self.targets)


def test_targets_of_megatrons_tokenizer() -> None:
    targets = [IGNORED, 5, 6, IGNORED, 9]
    tokens, answers = encode_by_megatron(Megatrons(targets, pad=6))(chat("a"))
    assert (tokens.tolist(), answers.tolist()) == ([0, 1, 2, 3, 4], [False, True, False, False, True])
    assert encode_by_megatron(Megatrons(targets, pad=None))(chat("a"))[1].tolist() == [False, True, True, False, True]
    with pytest.raises(ValueError, match="the prompt format does not fit: expected turn tokens to match"):
        encode_by_megatron(Megatrons(targets, None))(chat("odd"))
