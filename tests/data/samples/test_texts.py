from __future__ import annotations

import json

import pytest

from bytescale_ext.data.samples.texts import encoder, json_text, json_weights


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


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("0.5", [0.5, 0.5, 0.5]), ("-2", [-2.0] * 3), ("[1, 0.5]", [1.0, 0.5, 0.0]), ("[1, 2, 3]", [1.0, 2.0, 3.0])],
)
def test_weights_of_a_line(value: str, wanted: list[float]) -> None:
    assert json_weights(f'{{"w": {value}}}'.encode(), "w", "a:1", 3).tolist() == wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"a"', "a:1: no number and no list of numbers under the key 'w'"),
        ("[1, null]", "no number and no list"),
        ("true", "no number and no list"),
        ("[1]", "a:1: 1 weights under the key 'w' for 2 tokens"),
        ("[1, 2, 3, 4]", "4 weights under the key"),
        ("1" + "0" * 400, "a weight under the key 'w' is above 1e[+]30"),
        ("1e999", "above 1e[+]30"),
        ("NaN", "no number of JSON"),
    ],
)
def test_bad_weights_of_a_line_are_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        json_weights(f'{{"w": {value}}}'.encode(), "w", "a:1", 3)
