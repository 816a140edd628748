"""Token ids of conversations by the chat template of a tokenizer, with a mask of the answers.

The answers are found by the first of three methods that fits:

- ``{% generation %}`` marks of the template, as in transformers' ``return_assistant_tokens_mask``;
- rendering the conversation with and without each answer: the text after the prompt for the answer is the answer;
- rendering each answer as inference would, if the template writes earlier messages in another way than the last (for
  example without their reasoning): such answers become documents of their own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, TypedDict, cast

import numpy as np

from bytescale_ext.data.samples.chat_answers import ANY_TEXT, Answer, Render, answer_at, equal_characters
from bytescale_ext.data.samples.chats import Conversation, Encoded, Message, text_of, unwritten_notes
from bytescale_ext.data.samples.template_limits import LimitedFunction, check_template
from bytescale_ext.json_input import json_value

BY_MARKS: Final = "generation marks of the chat template"
BY_PROMPTS: Final = "rendering with and without each answer"
AS_INFERENCE: Final = "rendering each answer as inference does"
_MARK: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_Told = tuple[Counter[str], Counter[str], Counter[str], int, int]


class EncodedText(TypedDict):
    """Token ids of a text, and the character range [start, stop) of each token."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


class MarkedTokens(TypedDict):
    """Token ids of a conversation, and 1 for each token inside a generation mark, else 0."""

    input_ids: list[int]
    assistant_masks: list[int]


class TemplateTokenizer(Protocol):
    """Interface of a tokenizer of the transformers library, as far as it is used."""

    is_fast: bool
    chat_template: str | dict[str, str] | None

    def apply_chat_template(self, conversation: list[Message], **settings: object) -> object: ...

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> EncodedText: ...


class TemplateEncoder:
    """Encodes conversations with the chat template of a tokenizer.

    Raises:
        ValueError: the tokenizer has no chat template, or cannot map tokens to characters.
    """

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template: add one to its tokenizer_config.json, or use SFTTokenizer"
            )
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer cannot say where its tokens are in a text: give one with a tokenizer.json")
        check_template(tokenizer.chat_template)
        self._tokenizer = tokenizer
        added: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = set(getattr(tokenizer, "all_special_ids", []))
        self._special |= {token for token, value in added.items() if getattr(value, "special", False)}
        self._added = {token: str(value) for token, value in added.items()}
        self._methods: Counter[str] = Counter()
        self._unwritten: Counter[str] = Counter()
        self._without_end = 0
        self._without_reasoning = 0
        self._modes: Counter[str] = Counter()
        self._limited = LimitedFunction(self._told_documents)

    def __call__(self, conversation: Conversation) -> list[Encoded]:
        """Return the documents of a conversation.

        Raises ValueError if an answer cannot be located, or the template exceeds its limits of time and memory.
        """
        documents, told = self._limited(conversation)
        self._methods, self._unwritten, self._modes, self._without_end, self._without_reasoning = told
        return documents

    def _told_documents(self, conversation: Conversation) -> tuple[list[Encoded], _Told]:
        """Return the documents of a conversation, and the counts of all conversations; runs in a process of its own."""
        documents = self._documents(conversation)
        return documents, (self._methods, self._unwritten, self._modes, self._without_end, self._without_reasoning)

    def _documents(self, conversation: Conversation) -> list[Encoded]:
        settings = dict(conversation.settings)

        def render(messages: Sequence[Message], prompt: bool = False, mode: Mapping[str, object] = {}) -> str:
            given = {**mode, **settings, "tokenize": False, "add_generation_prompt": prompt}
            return str(self._tokenizer.apply_chat_template(list(messages), **given))

        messages = _suited(conversation.messages, render)
        text = render(messages)
        for key in _unwritten_keys(messages, settings, text, render):
            self._unwritten[key] += 1
        if "tools" in settings and self._is_without_tools(messages, settings, text):
            self._unwritten["tools"] += 1
        marked = self._by_marks(messages, settings)
        if marked is not None:
            self._methods[BY_MARKS] += 1
            return [marked]
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        answers = {turn: answer_at(messages, turn, settings, render) for turn in turns}
        self._modes.update(answer.mode for answer in answers.values() if answer.mode)
        self._without_reasoning += sum(answer.lacks_reasoning for answer in answers.values())
        documents = list(self._by_prompts(messages, text, answers, render))
        is_plain = len(documents) == 1 and documents[0][2]
        self._methods[BY_PROMPTS if is_plain else AS_INFERENCE] += 1
        return [(tokens, answers) for tokens, answers, _ in documents]

    def _is_without_tools(self, messages: list[Message], settings: dict[str, object], text: str) -> bool:
        """Return whether a template writes the same text without the tools."""
        given = {**settings, "tools": None, "tokenize": False, "add_generation_prompt": False}
        try:
            return text == self._tokenizer.apply_chat_template(list(messages), **given)
        except Exception:  # the template needs tools
            return False

    def notes(self) -> list[str]:
        """Return lines about the methods, and about keys, reasoning and ends of turns that are missing."""
        lines = [f"answers of {count:,} chats found by {method}" for method, count in self._methods.items()]
        if self._without_reasoning:
            lines.append(
                f"{self._without_reasoning:,} answers have no reasoning, which the template's prompt begins: an empty "
                "one is trained"
            )
        lines += [f"{count:,} answers follow the template's prompt with {mode}" for mode, count in self._modes.items()]
        if self._without_end:
            lines.append(f"WARNING: {self._without_end:,} answers end without a token that ends a turn")
        return lines + unwritten_notes(self._unwritten, "chat template")

    def _by_marks(self, messages: list[Message], settings: dict[str, object]) -> Encoded | None:
        """Return the tokens and answers by the template's marks, or None without marks."""
        get = getattr(self._tokenizer, "get_chat_template", None)
        template = self._tokenizer.chat_template if get is None else get(tools=settings.get("tools"))
        if not isinstance(template, str) or not _MARK.search(template):
            return None
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = cast(MarkedTokens, self._tokenizer.apply_chat_template(messages, **{**settings, **asked}))
        tokens, answers = np.array(encoded["input_ids"], dtype=np.int64), np.array(encoded["assistant_masks"], bool)
        if not answers.any():
            return None
        lasts = np.flatnonzero(answers & ~np.append(answers[1:], False))
        self._without_end += sum(not self._ends(int(tokens[last])) for last in lasts)
        return tokens, answers

    def _by_prompts(
        self, messages: list[Message], whole: str, answers: Mapping[int, Answer], render: Render
    ) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Yield (token ids [n], answers [n], whether the text is the template's) of documents with all answers.

        ``answers``: texts of the answer at each turn of the assistant.
        """
        documents = [] if answers else [(*self._encoded(whole, [], None), True)]
        text, is_plain, remaining = whole, True, dict(answers)
        while remaining:
            last = max(remaining)
            spans = self._spans(text, remaining)
            if last not in spans:
                text, is_plain = remaining[last].text, False
                spans = {**self._spans(text, remaining), last: (len(remaining[last].prompt), remaining[last].stop)}
            at_end = spans[last][1] == len(text)
            following = self._following(messages[: last + 1], text, render) if at_end else None
            documents.append((*self._encoded(text, sorted(spans.values()), following), is_plain))
            remaining = {turn: answer for turn, answer in remaining.items() if turn not in spans}
        yield from reversed(documents)

    def _spans(self, text: str, answers: dict[int, Answer]) -> dict[int, tuple[int, int]]:
        """Return the ranges of the answers that a text shows as inference does."""
        found = ((turn, self._span(text, answer)) for turn, answer in answers.items())
        return {turn: span for turn, span in found if span is not None}

    def _span(self, text: str, answer: Answer) -> tuple[int, int] | None:
        """Return the range of an answer in a text, or None if the text does not show the answer as inference does.

        What the template writes only after a last answer may be missing, if a token before it ends the turn.
        """
        start = len(answer.prompt)
        if not text.startswith(answer.prompt):
            return None
        if text.startswith(answer.text[: answer.stop]):
            return start, answer.stop
        common = equal_characters(text, answer.text)
        last, is_end = 0, False
        for token, (begin, stop) in zip(*self._tokens(answer.text), strict=True):
            if begin >= start and stop <= common and answer.text[begin:stop].strip():
                last, is_end = stop, self._ends(token)
            elif begin >= start and stop > common and not self._ends(token) and answer.text[begin:stop].strip():
                return None  # more than marks differs
        blank = common - len(answer.text[last:common].lstrip())
        return (start, max(last, min(blank, common))) if is_end else None

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _ends(self, token: int) -> bool:
        """Return whether a token can end a turn: a special or added token other than a closing tag."""
        return token in self._special or not self._added.get(token, "</").startswith("</")

    def _following(self, messages: list[Message], text: str, render: Render) -> int | None:
        """Return the token that the template writes before a next message of the user; None if there is no token."""
        try:
            longer = render([*messages, {"role": "user", "content": ANY_TEXT}])
        except Exception:  # templates raise their own error types
            return None
        if not longer.startswith(text):
            return None
        tokens, offsets = self._tokens(longer)
        return next((token for token, (start, _) in zip(tokens, offsets, strict=True) if start >= len(text)), None)

    def _encoded(
        self, text: str, spans: Sequence[tuple[int, int]], following: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and answers, both [n], of a text with answers in ``spans``.

        The token that ends a turn is a part of the answer, also if it begins the next message. ``following``: first
        token of a next message; it is appended if nothing else ends the last answer.
        """
        tokens, offsets = self._tokens(text)
        starts = np.array([start for start, _ in offsets], dtype=np.int64)
        answers = np.zeros(len(tokens), dtype=bool)
        for start, stop in spans:
            inside = np.flatnonzero((starts >= start) & (starts < stop))
            answers[inside] = True
            shown = [place for place in inside.tolist() if text[slice(*offsets[place])].strip()]
            if shown and self._ends(tokens[shown[-1]]):
                continue
            after = int(inside[-1]) + 1 if len(inside) else len(tokens)
            if after < len(tokens) and self._ends(tokens[after]):
                answers[after] = True
            elif after == len(tokens) and following is not None and self._ends(following):
                tokens, answers = [*tokens, following], np.append(answers, True)
            else:
                self._without_end += 1
        return np.array(tokens, dtype=np.int64), answers


def _suited(messages: list[Message], render: Render) -> list[Message]:
    """Return the messages in the form that lets the template write the most contents; the first of equal forms.

    The forms: as given; contents as plain texts; arguments of calls as objects or as texts; contents as lists of parts.
    Raises the template's error if it refuses all forms.
    """
    plain = [{**message, "content": text_of(message.get("content"))} for message in messages]
    forms = [messages, plain]
    forms += [[_with_arguments(message, as_text) for message in form] for as_text in (False, True) for form in forms]
    forms += [[_with_parts(message) for message in form] for form in (plain, forms[2], forms[4])]
    contents = [text for message in messages for part in _parts(message) if (text := text_of([part]).strip())]
    first: Exception | None = None
    best, most = None, -1
    for number, form in enumerate(forms):
        if form in forms[:number]:
            continue
        try:
            text = render(form)
        except Exception as error:  # templates raise their own error types
            first = first or error
            continue
        num_written = sum(content in text for content in contents)
        if num_written > most and not any(_leaks(message.get("content"), text) for message in form):
            best, most = form, num_written
        if most == len(contents):
            break
    if best is not None:
        return best
    if first is None:
        raise ValueError("the chat template writes lists of parts as Python code: give contents as text")
    raise first


def _parts(message: Message) -> list[object]:
    """Return the parts of a message's content; a text is one part."""
    content = message.get("content")
    return content if isinstance(content, list) else [content or ""]


def _with_parts(message: Message) -> Message:
    """Return a message whose content is a list of one part, or of none without a text."""
    content = text_of(message.get("content"))
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _leaks(content: object, text: str) -> bool:
    """Return whether a template has written a list or None as Python does."""
    return isinstance(content, list) and bool(content) and str(content) in text


def _with_arguments(message: Message, as_text: bool) -> Message:
    """Return a message whose calls have their arguments as JSON text, or as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message

    def converted(call: object) -> object:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            return call
        arguments = function.get("arguments")
        if as_text and isinstance(arguments, dict):
            return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if not as_text and isinstance(arguments, str):
            try:
                return {**call, "function": {**function, "arguments": json_value(arguments)}}
            except ValueError:
                return call
        return call

    return {**message, "tool_calls": [converted(call) for call in calls]}


def _unwritten_keys(messages: list[Message], settings: dict[str, object], text: str, render: Render) -> Iterator[str]:
    """Yield a key for each message whose value under that key does not change the text."""
    for turn, message in enumerate(messages):
        for key, value in message.items():
            if key == "role" or value in (None, "", [], {}):
                continue
            if key == "content" and isinstance(value, str) and value.strip() in text:
                continue
            other: Message = {**message, "content": ANY_TEXT} if key == "content" else _without(message, key)
            try:
                if render([*messages[:turn], other, *messages[turn + 1 :]]) == text:
                    yield key if key != "content" else f"content of {message['role']}"
            except Exception:  # the template needs the key
                continue


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}
