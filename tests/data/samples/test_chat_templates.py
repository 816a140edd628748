"""Answers of chats by templates with the constructs of known models: their context, their ends, and what is told."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from bytescale_ext.data.samples.chat_templates import AS_INFERENCE, BY_MARKS, BY_PROMPTS, TemplateEncoder
from bytescale_ext.data.samples.chats import Conversation, Message
from tests.data.chats import chat, message, trained
from tests.data.samples.templates import SPECIAL, TEMPLATES, Template

CALL = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WITH_TOOLS: list[Message] = [
    message("user", "weather in Oslo"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3 degrees"},
    message("assistant", "it is cold"),
    message("user", "thanks"),
    message("assistant", "welcome"),
]
CHATS = {"single": chat("one", "two"), "several": chat("one", "two", "three", "four", "five", "six")}


@cache
def _model() -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=trained(), bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    return made


def tokenizer(template: Template | str) -> Any:
    made = copy.copy(_model())
    made.chat_template = template if isinstance(template, str) else template.text
    return made


def answers_of(document: Any) -> list[list[int]]:
    """Return the token ids of each run of answer tokens."""
    tokens, mask = document
    runs: list[list[int]] = []
    for place in mask.nonzero()[0].tolist():
        if not runs or not mask[place - 1]:
            runs.append([])
        runs[-1].append(int(tokens[place]))
    return runs


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", [*CHATS, "tools"])
def test_answers_have_the_context_of_inference_and_an_end(name: str, kind: str) -> None:
    template = TEMPLATES[name]
    if kind == "tools" and not template.has_tools:
        pytest.skip("the template has no tools")
    model = tokenizer(template)
    messages = WITH_TOOLS if kind == "tools" else CHATS[kind]
    settings = {"tools": TOOLS} if kind == "tools" else {}
    encode = TemplateEncoder(model)
    documents = encode(Conversation(messages, settings))
    if name == "calls as text":  # its calls are texts, as transformers documents them for this kind
        call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages = [{**each, **({"tool_calls": [call]} if "tool_calls" in each else {})} for each in messages]
    turns = [turn for turn, each in enumerate(messages) if each["role"] == "assistant"]
    prompts = [
        model.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True, **settings)
        for turn in turns
    ]
    found = []
    for tokens, mask in documents:
        begins = [place for place in mask.nonzero()[0].tolist() if not mask[place - 1]]
        found += [
            (model.decode(tokens[:begin]), run) for begin, run in zip(begins, answers_of((tokens, mask)), strict=True)
        ]
    found.sort(key=lambda pair: len(pair[0]))
    assert [start for start, _ in found] == prompts
    for turn, (_, run) in zip(turns, found, strict=True):
        assert (messages[turn]["content"] or "weather") in model.decode(run)
        ends = [token for token in model.convert_ids_to_tokens(run) if token in SPECIAL]
        assert template.end in ends if turn == turns[-1] else ends
    rewrites = template.rewrites == "always" or template.rewrites == kind
    assert (len(documents) > 1) == (rewrites and len(turns) > 1)
    method = BY_MARKS if name == "marks" else AS_INFERENCE if rewrites and len(turns) > 1 else BY_PROMPTS
    if not name.startswith("prompt "):
        assert f"answers of 1 chats found by {method}" in encode.notes()


@pytest.mark.slow
def test_marks_give_the_mask_of_transformers() -> None:
    model = tokenizer(TEMPLATES["marks"])
    (tokens, mask), *more = TemplateEncoder(model)(Conversation(WITH_TOOLS, {"tools": TOOLS}))
    theirs = model.apply_chat_template(WITH_TOOLS, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    assert not more
    assert tokens.tolist() == theirs["input_ids"]
    assert mask.tolist() == [bool(value) for value in theirs["assistant_masks"]]


THINKS = "<think>\nabc\n</think>\n\n"


@pytest.mark.parametrize(
    ("answer", "wanted", "note"),
    [
        ({"content": "two", "reasoning_content": "abc"}, "abc\n</think>\n\ntwo<|im_end|>\n", ""),
        ({"content": f"{THINKS}two"}, "abc\n</think>\n\ntwo<|im_end|>\n", ""),
        ({"content": "two"}, "\n</think>\n\ntwo<|im_end|>\n", "1 answers have no reasoning"),
    ],
)
def test_reasoning_after_a_prompt_that_opens_it(answer: Message, wanted: str, note: str) -> None:
    model = tokenizer(TEMPLATES["prompt opens reasoning"])
    encode = TemplateEncoder(model)
    documents = encode(Conversation([message("user", "one"), {"role": "assistant", **answer}]))
    assert [model.decode(run) for run in answers_of(documents[0])] == [wanted]
    assert any(line.startswith(note) for line in encode.notes())


def test_reasoning_of_earlier_answers_is_trained_with_their_context() -> None:
    model = tokenizer(TEMPLATES["reasoning of the last query"])
    messages = [
        message("user", "one"), message("assistant", f"{THINKS}two"),
        message("user", "three"), {"role": "assistant", "content": "four", "reasoning_content": "def"},
    ]  # fmt: skip
    encode = TemplateEncoder(model)
    texts = [[model.decode(run) for run in answers_of(each)] for each in encode(Conversation(messages))]
    assert texts == [[f"{THINKS}two<|im_end|>\n"], ["<think>\ndef\n</think>\n\nfour<|im_end|>\n"]]


def test_what_is_not_written_is_counted() -> None:
    encode = TemplateEncoder(tokenizer("{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}</s>{% endif %}"
                                       "{% endfor %}"))  # fmt: skip
    encode(Conversation([{**WITH_TOOLS[0], "name": "x"}, {**WITH_TOOLS[1], "content": "a"}, *WITH_TOOLS[2:]],
                        {"tools": TOOLS}))  # fmt: skip
    assert encode.notes()[-1] == (
        "WARNING: the chat template does not write these keys of messages: content of tool (1), name (1), "
        "tool_calls (1), tools (1)"
    )


def test_parts_and_calls_take_the_form_that_the_template_can_write() -> None:
    model = tokenizer("{% for m in messages %}<|h|>{{ m['content'] }}<|eot|>{% endfor %}"
                      "{% if add_generation_prompt %}<|h|>{% endif %}")  # fmt: skip
    parts = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
    messages = [{"role": "user", "content": parts}, message("assistant", "two")]
    ((tokens, _),) = TemplateEncoder(model)(Conversation(messages))
    assert model.decode(tokens) == "<|h|>one<|eot|><|h|>two<|eot|>"
    reads_parts = tokenizer("{% for m in messages %}<|h|>{% if m.content is string %}{{ m.content }}{% else %}"
                            "{{ m.content | map(attribute='text') | join('+') }}{% endif %}<|eot|>{% endfor %}"
                            "{% if add_generation_prompt %}<|h|>{% endif %}")  # fmt: skip
    ((tokens, _),) = TemplateEncoder(reads_parts)(Conversation(messages))
    assert reads_parts.decode(tokens) == "<|h|>on+e<|eot|><|h|>two<|eot|>"


def test_an_answer_without_an_end_is_told() -> None:
    encode = TemplateEncoder(tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                                       "{% if add_generation_prompt %}assistant: {% endif %}"))  # fmt: skip
    encode(Conversation(chat("one", "two", "three", "four")))
    assert encode.notes()[-1] == "WARNING: 2 answers end without a token that ends a turn"


def test_a_template_that_refuses_says_why() -> None:
    encode = TemplateEncoder(tokenizer("{{ raise_exception('no system') }}"))
    with pytest.raises(Exception, match="no system"):
        encode(Conversation(chat("one", "two", system="s")))


def test_a_template_of_parts_takes_texts() -> None:
    template = (
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>{% for p in m.content %}{{ p.text }}{% endfor %}<|eot|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|h|>assistant<|/h|>{% endif %}"
    )
    model = tokenizer(template)
    encode = TemplateEncoder(model)
    ((tokens, mask),) = encode(Conversation(chat("one", "two")))
    assert model.decode(tokens) == "<|h|>user<|/h|>one<|eot|><|h|>assistant<|/h|>two<|eot|>"
    assert [model.decode(run) for run in answers_of((tokens, mask))] == ["two<|eot|>"]
    assert not any("WARNING" in line for line in encode.notes())


def test_prompts_in_another_mode_are_counted() -> None:
    encode = TemplateEncoder(tokenizer(
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
        "{{ m.content }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|><think>"
        "{% if not thinking %}</think>{% endif %}{% endif %}"
    ))  # fmt: skip
    encode(Conversation([message("user", "one"), {"role": "assistant", "content": "two", "reasoning": "abc"}]))
    assert "1 answers follow the template's prompt with thinking=True" in encode.notes()
