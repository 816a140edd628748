"""Conversations for tests, and a transformers tokenizer that is trained on their text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")
# Roles by name, an end mark after each message, and a prompt for the next answer.
TEMPLATE = (
    "{% for message in messages %}<SPECIAL_11>{{ message['role'] }}\n{{ message['content'] }}<SPECIAL_12>\n{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>assistant\n{% endif %}"
)
WORDS = "the river turns north where old maps show a bridge of stone and no road leads back to it".split()
Messages = list[dict[str, str]]


def message(role: str, content: str) -> dict[str, str]:
    """Return one message."""
    return {"role": role, "content": content}


def chat(*contents: str, system: str = "") -> Messages:
    """Return a conversation with alternating messages of user and assistant."""
    turns = [message(("user", "assistant")[turn % 2], content) for turn, content in enumerate(contents)]
    return [*([message("system", system)] if system else []), *turns]


def write_lines(path: Path, chats: Sequence[Messages]) -> Path:
    """Write a JSONL file with a line for each entry."""
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats), encoding="utf-8")
    return path


def random_chats(lengths: Sequence[Sequence[int]], seed: int = 0) -> list[Messages]:
    """Return conversations with these numbers of words per message. Every third begins with a system message."""
    generator = random.Random(seed)
    found = []
    for number, sizes in enumerate(lengths):
        contents = [" ".join(generator.choices(WORDS, k=size)) for size in sizes]
        found.append(chat(*contents, system="" if number % 3 else "Answer in one sentence"))
    return found


def write_tokenizer(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """Train byte-pair encoding on the words of the tests, save it for transformers, and return the folder."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained(), unk_token="<unk>", eos_token="<SPECIAL_12>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def trained() -> Any:
    """Return a byte-pair tokenizer. It encodes a word of the tests as one or two tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS), "Assistant\nassistant\nUser\nuser\nSystem\n"] * 50, trainer)
    return tokenizer
