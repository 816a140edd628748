from __future__ import annotations

import json

import pytest

from bytescale_ext.data.samples.texts import encoder, json_text


class Words:
    """Tokenizer with one id per character: its code point modulo 1000."""

    vocab_size = 1001
    eod = 1000

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) % 1000 for letter in text]


@pytest.mark.parametrize("text", ["", "plain", "é 漢字 🙂", 'quotes " and \\ and \n lines'])
def test_text_comes_out_of_its_line(text: str) -> None:
    line = json.dumps({"other": 1, "body": text}).encode()
    assert json_text(line + b"\r\n", "body", "a:1") == text.encode()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{'text': 1}", ["not JSON", "one JSON object"]),
        (b'{"text": "a"', ["not JSON"]),
        (b'{"b": "x", "a": 1}', ["no text under the key 'text'", "['a', 'b']", "--json-key"]),
        (b'{"text": 5}', ["no text under the key 'text'", "['text']"]),
        (b'["text"]', ["no text under the key 'text'", "list"]),
        (b"\xff", ["not JSON"]),
    ],
)
def test_bad_lines_are_named(line: bytes, words: list[str]) -> None:
    with pytest.raises(ValueError, match=":17: ") as refused:
        json_text(line, "text", "folder/docs.jsonl:17")
    assert str(refused.value).startswith("folder/docs.jsonl:17: ")
    for word in words:
        assert word in str(refused.value)


def test_tokenizers_end_each_document_and_say_what_was_no_utf8() -> None:
    encode = encoder(Words())
    tokens, is_utf8 = encode("aé".encode())
    assert tokens.tolist() == [97, 233, 1000]
    assert is_utf8
    assert encode(b"a\xff") == (pytest.approx([97, 0xFFFD % 1000, 1000]), False)
    assert encode("a\ufffd".encode())[1] is True  # the replacement character itself is valid text
