"""Places of the answers in the text of a chat template: the prompt that inference shows, and what follows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from bytescale_ext.data.samples.chats import Message, text_of

ANY_TEXT: Final = "\N{BLACK SQUARE}"
_OPENING: Final = re.compile(r"\s*<(\w+)>(\s*)")
_REASONS: Final = re.compile("think|thought|reason", re.IGNORECASE)
_TAG: Final = re.compile(r"<[^<>\s]+>")
_LAST_MARK: Final = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])[^<>\[\]]*\Z")
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
# Arguments of known templates: the prompt begins a reasoning, or it does not.
_MODES: Final = tuple({key: value} for value in (True, False) for key in ("enable_thinking", "thinking"))


class Render(Protocol):
    """Writes messages with a chat template, with or without the prompt for an answer.

    ``mode``: further arguments of the template, which the chat does not set.
    """

    def __call__(self, messages: Sequence[Message], prompt: bool = False, mode: Mapping[str, object] = {}) -> str: ...


@dataclass(frozen=True)
class Answer:
    """The texts around an answer.

    Attributes:
        prompt: text that inference shows to the model.
        text: the prompt, the answer, and what the template writes after a last answer.
        stop: end of the answer in ``text``.
        lacks_reasoning: whether the prompt begins a reasoning and the message has none, so that an empty one follows.
        mode: argument of the template that the prompt needs, such as "enable_thinking=True"; "" without any.
    """

    prompt: str
    text: str
    stop: int
    lacks_reasoning: bool = False
    mode: str = ""


def answer_at(messages: Sequence[Message], turn: int, settings: Mapping[str, object], render: Render) -> Answer:
    """Return the texts of the answer at ``messages[turn]``.

    If the answer does not fit the template's usual prompt, the prompts with and without a reasoning are tried.

    Raises:
        ValueError: the answer fits no prompt.
    """
    usual = _Turn(messages, turn, render, {})
    found = usual.answer()
    if found is not None:
        return found
    for mode in _MODES:
        if settings.keys() & mode.keys():
            continue
        try:
            other = _Turn(messages, turn, render, mode)
            found = None if other.prompt == usual.prompt else other.answer()
        except Exception:  # templates raise their own error types
            continue
        if found is not None:
            return replace(found, mode=", ".join(f"{key}={value}" for key, value in mode.items()))
    common = usual.common
    raise ValueError(
        f"the chat template ends the prompt for message {turn + 1} with {usual.prompt[common:][-40:]!r} and writes the "
        f"message as {usual.text[common : common + 40]!r}, so the answer cannot be located: use another template"
    )


class _Turn:
    """The texts of a template around one answer, in one mode of reasoning."""

    def __init__(self, messages: Sequence[Message], turn: int, render: Render, mode: Mapping[str, object]) -> None:
        self._messages, self._message, self._render, self._mode = messages[:turn], messages[turn], render, mode
        self.prompt = render(self._messages, True, mode)
        self.text = self._written(self._message)
        self.common = self._common(self.text)

    def answer(self) -> Answer | None:
        """Return the texts of the answer, or None if it does not fit the prompt."""
        if self.text.startswith(self.prompt):
            return Answer(self.prompt, self.text, len(self.text))
        rest = self._following(self._message, self.text)
        if rest is not None:
            return self._after_prompt(rest)
        opened, written = self.prompt[self.common :], self.text[self.common :]
        opening = _OPENING.fullmatch(opened)
        if opening is not None:
            reasoning, is_empty = _reasoning(self._message, opening, written)
            return self._after_prompt(reasoning + written, is_empty)
        return self._in_other_context() or self._with_empty_reasoning()

    def _written(self, message: Message) -> str:
        """Return the text of the chat up to a message in the place of the answer."""
        return self._render([*self._messages, message], False, self._mode)

    def _after_prompt(self, rest: str, lacks_reasoning: bool = False) -> Answer:
        text = self.prompt + rest
        return Answer(self.prompt, text, len(text), lacks_reasoning)

    def _common(self, text: str) -> int:
        """Return the length of the common beginning of the prompt and a text. It does not end inside a tag."""
        common = equal_characters(self.prompt, text)
        tag = self.prompt.rfind("<", 0, common)
        return tag if tag >= 0 and ">" not in self.prompt[tag:common] else common

    def _following(self, message: Message, text: str) -> str | None:
        """Return the part of a text after the prompt, or None if the message cannot follow the prompt."""
        common = self._common(text)
        opened, rest = self.prompt[common:], text[common:]
        if opened.isspace() or _is_complete(opened, rest, text_of(message.get("content"))):
            return rest
        given = _given_reasoning(message)
        is_line = bool(given) and not _TAG.search(opened) and bool(_REASONS.search(opened))
        return rest if is_line and rest.lstrip().startswith(given) else None

    def _in_other_context(self) -> Answer | None:
        """Return the texts of an answer whose prompt the template writes anew, once the answer follows.

        The message begins after the last mark of the prompt that is left of the first character that changes with the
        values of the message.
        """
        try:
            other = self._written(_marked(self._message))
            without = self._render(self._messages, False, self._mode)
        except Exception:  # templates raise their own error types
            return None
        stop = equal_characters(other, self.text)
        shown = text_of(self._messages[-1].get("content")).strip() if self._messages else ""
        least = self.text.rfind(shown, 0, stop) + len(shown) if shown else 0
        further = self.prompt[len(without) :] if self.prompt.startswith(without) else ""
        last = _LAST_MARK.search(self.prompt)
        for mark in (further, last.group() if last else ""):
            place = self.text.rfind(mark, 0, stop) if mark.strip() else -1
            if place >= 0 and place + len(mark) >= least:
                return self._after_prompt(self.text[place + len(mark) :])
        return None

    def _with_empty_reasoning(self) -> Answer | None:
        """Return the texts of an answer with an empty reasoning after a prompt that begins one."""
        if _given_reasoning(self._message):
            return None
        for key in _REASONING:
            message = {**self._message, key: ANY_TEXT}
            try:
                text = self._written(message)
            except Exception:  # templates raise their own error types
                continue
            rest = text[len(self.prompt) :] if text.startswith(self.prompt) else self._following(message, text)
            if rest is not None and rest.lstrip().startswith(ANY_TEXT):
                return self._after_prompt(rest.replace(ANY_TEXT, "", 1), True)
        return None


def equal_characters(a: str, b: str) -> int:
    """Return the number of equal characters at the beginning of two texts."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_complete(opened: str, rest: str, content: str) -> bool:
    """Return whether an answer as it is written can follow a prompt that the template ends with further text.

    The further text is a begun and ended reasoning, or no reasoning at all, such as a mark of the role after a tool.

    Args:
        opened: further text at the end of the prompt.
        rest: text that the template writes for the message.
        content: content of the message.
    """
    if _REASONS.search(opened):
        return len(_TAG.findall(opened)) == 2 and not _TAG.sub("", opened).strip().replace("thought", "")
    return bool(content.strip()) and rest.lstrip().startswith(content.strip())


def _given_reasoning(message: Message) -> str:
    """Return the reasoning under a key of a message, "" without any."""
    return next((value.strip() for key in _REASONING if isinstance(value := message.get(key), str)), "")


def _reasoning(message: Message, opening: re.Match[str], rest: str) -> tuple[str, bool]:
    """Return the reasoning of a message after its ``opening``, with the closing tag, and whether it is empty.

    ``rest``: text that the template writes for the message, without the reasoning.
    """
    tag, blank = opening.groups()
    inside, closed, _ = text_of(message.get("content")).partition(f"</{tag}>")
    given = _given_reasoning(message)
    if closed and f"</{tag}>" not in rest:
        given = inside.strip().removeprefix(f"<{tag}>").strip()
    return f"{given}{blank}</{tag}>{blank * 2}", not given


def _marked(message: Message) -> Message:
    """Return a message whose texts begin with another character."""

    def marked(value: object) -> object:
        if isinstance(value, str):
            return ANY_TEXT + value if value.strip() else value
        if isinstance(value, list):
            return [marked(part) if isinstance(part, str) else _with(part, "text", marked) for part in value]
        return value

    changed: Message = {key: marked(message[key]) for key in ("content", *_REASONING) if key in message}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_with(call, "function", lambda each: _with(each, "name", marked)) for call in calls]
    return {**message, **changed}


def _with(value: object, key: str, change: Callable[[object], object]) -> object:
    """Return an object with another value under a key that it has."""
    return {**value, key: change(value[key])} if isinstance(value, dict) and key in value else value
