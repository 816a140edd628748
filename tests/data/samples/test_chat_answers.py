"""Prompts and answers of templates that write a chat anew, or end the prompt with a reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from jinja2 import Environment

from bytescale_ext.data.samples.chat_answers import Answer, Render, answer_at
from bytescale_ext.data.samples.chats import Message
from tests.data.chats import message

CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
WITH_TEXT: list[Message] = [
    message("user", "weather in Oslo"),
    {"role": "assistant", "content": "a tool helps", "tool_calls": [CALL]},
    {"role": "tool", "content": "3 degrees"},
    message("assistant", "it is cold"),
]
ONE: list[Message] = [message("user", "one"), message("assistant", "two")]
THOUGHT: list[Message] = [message("user", "one"), {"role": "assistant", "content": "two", "reasoning_content": "abc"}]
# The text of a message with a call is a reasoning. The template drops it once an answer follows.
ANALYSIS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if loop.index0 > ns.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to={{ m.tool_calls[0].function.name }}<|call|>{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}{% if prompt %}<|start|>assistant{% endif %}"
)
# The system message stands before the last query, if nothing follows it.
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last %}{{ messages[0].content }}: {% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# A newline after the results of tools, unless they are last.
NEWLINE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}{% if m.role == 'tool' and not loop.last %}|"
    "{% endif %}<|im_end|>{% endfor %}{% if prompt %}<|im_start|>assistant|{% endif %}"
)
# Calls lack the mark that begins a turn.
NO_MARK = (
    "{% for m in messages %}{% if not m.tool_calls %}<|TURN|>{% endif %}<|{{ m.role }}|>"
    "{{ 'Action:' + m.tool_calls[0].function.name if m.tool_calls else m.content }}<|END|>{% endfor %}"
    "{% if prompt %}<|TURN|><|assistant|>{% endif %}"
)
# The prompt ends an empty reasoning, or begins a reasoning if it is asked for.
SWITCH = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if prompt %}<|assistant|><think>{% if not enable_thinking %}"
    "</think>{% endif %}{% endif %}"
)
# A line of text, which messages of the past lack, begins the reasoning.
LINE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}{{ m.reasoning_content }}[ANSWER]{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if prompt %}<|assistant|>My reasoning: {% endif %}"
)
# Marks of its own begin and end a reasoning.
MARKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<|THINKING|>{{ m.reasoning_content }}"
    "<|/THINKING|>{% endif %}{{ m.content }}<|end|>{% endfor %}{% if prompt %}<|assistant|><|THINKING|>{% endif %}"
)


def render_with(template: str) -> Render:
    compiled = Environment(autoescape=False).from_string(template)

    def render(messages: Sequence[Message], prompt: bool = False, mode: Mapping[str, object] = {}) -> str:
        return compiled.render(messages=messages, prompt=prompt, **mode)

    return render


def located(template: str, messages: Sequence[Message], turn: int, **settings: object) -> Answer:
    return answer_at(messages, turn, settings, render_with(template))


@pytest.mark.parametrize(
    ("template", "messages", "answer"),
    [
        (ANALYSIS, WITH_TEXT, "<|message|>it is cold<|end|>"),
        (SYSTEM_LAST, [message("system", "be brief"), *ONE], "two</s>"),
        (NEWLINE, WITH_TEXT, "it is cold<|im_end|>"),
        (NO_MARK, WITH_TEXT[:2], "Action:weather<|END|>"),
    ],
    ids=["reasoning dropped", "system before the last query", "newline", "mark lacks"],
)
def test_answers_follow_the_prompt_that_is_written_anew(
    template: str, messages: Sequence[Message], answer: str
) -> None:
    turn = len(messages) - 1
    render = render_with(template)
    prompt = render(messages[:turn], True)
    assert not render(messages).startswith(prompt)
    assert located(template, messages, turn) == Answer(prompt, prompt + answer, len(prompt + answer))


def test_the_reasoning_beside_a_call_is_a_part_of_its_answer() -> None:
    found = located(ANALYSIS, WITH_TEXT, 1)
    assert found.text[len(found.prompt) :] == (
        "<|channel|>analysis<|message|>a tool helps<|end|><|start|>assistant to=weather<|call|>"
    )


def test_equal_turns_are_told_apart() -> None:
    messages: list[Message] = [message("system", "s"), *ONE, *ONE, *ONE]
    found = [located(SYSTEM_LAST, messages, turn) for turn in (2, 4, 6)]
    assert [answer.text[len(answer.prompt) :] for answer in found] == ["two</s>"] * 3
    assert found[2].prompt == "[INST]one[/INST]two</s>[INST]one[/INST]two</s>[INST]s: one[/INST]"


@pytest.mark.parametrize(
    ("template", "messages", "prompt", "answer", "mode"),
    [
        (SWITCH, ONE, "<think></think>", "two<|end|>", ""),
        (SWITCH, THOUGHT, "<think>", "abc</think>two<|end|>", "enable_thinking=True"),
        (LINE, THOUGHT, "My reasoning: ", "abc[ANSWER]two<|end|>", ""),
        (LINE, ONE, "My reasoning: ", "[ANSWER]two<|end|>", ""),
        (MARKS, THOUGHT, "<|THINKING|>", "abc<|/THINKING|>two<|end|>", ""),
        (MARKS, ONE, "<|THINKING|>", "<|/THINKING|>two<|end|>", ""),
    ],
)
def test_prompts_that_begin_or_end_a_reasoning(
    template: str, messages: Sequence[Message], prompt: str, answer: str, mode: str
) -> None:
    found = located(template, messages, 1)
    assert found.prompt == f"<|user|>one<|end|><|assistant|>{prompt}"
    assert found.text == found.prompt + answer
    assert found.mode == mode
    assert found.lacks_reasoning == (messages == ONE and template != SWITCH)


def test_a_mode_that_the_chat_sets_stays() -> None:
    with pytest.raises(ValueError, match="so the answer cannot be located"):
        located(SWITCH, THOUGHT, 1, enable_thinking=False, thinking=False)


def test_an_answer_in_no_context_is_refused() -> None:
    template = "{% for m in messages %}A: {{ m.content }};{% endfor %}{% if prompt %}<|answer|>{% endif %}"
    with pytest.raises(
        ValueError, match=r"prompt for message 2 with '<\|answer\|>' and writes the message as 'A: two;'"
    ):
        located(template, [message("user", "one"), {**message("assistant", "two")}], 1)
