"""Data sets with tokenizers trained on text of the project, compared with the libraries of the tokenizers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer
from tiktoken._educational import bpe_train

from bytescale_ext.data.samples.lengths import check_indexed_dataset
from megatron.bytescale.cli import main

TEXT = (Path(__file__).resolve().parents[4] / "README.md").read_text()
WORDS = 400
SPECIAL = 1000


def sentencepiece_model(folder: Path) -> tuple[list[str], Callable[[str], list[int]]]:
    """Train a byte-pair model; return the flags of its tokenizer, and the library's own ids of a text."""
    (folder / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "spm"), vocab_size=WORDS, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    return ["SentencePieceTokenizer", "--tokenizer-model", str(folder / "spm.model")], model.encode


def hugging_face_folder(folder: Path) -> tuple[list[str], Callable[[str], list[int]]]:
    """Train a tokenizer with `tokenizer.json`; see above."""
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([TEXT], vocab_size=WORDS, special_tokens=["<eod>"], show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model._tokenizer, eos_token="<eod>")
    fast.save_pretrained(folder / "hf")
    return ["HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")], lambda text: model.encode(text).ids


def tiktoken_file(folder: Path) -> tuple[list[str], Callable[[str], list[int]]]:
    """Train a tokenizer with a list of tokens in Megatron's format. The first 1,000 ids are special tokens."""
    pattern = r"\s?\w+|\s+|[^\w\s]"
    ranks = bpe_train(TEXT[:2000], WORDS, pattern, visualise=None)
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for token, rank in sorted(ranks.items(), key=lambda entry: entry[1])
    ]
    (folder / "words.json").write_text(json.dumps(listed))
    flags = ["TikTokenizer", "--tokenizer-model", str(folder / "words.json"), "--vocab-size", str(SPECIAL + WORDS)]
    megatron = TikTokenTokenizer(str(folder / "words.json"), vocab_size=SPECIAL + WORDS)
    own = tiktoken.Encoding("own", pat_str=megatron.tokenizer._pat_str, mergeable_ranks=ranks, special_tokens={})
    return [*flags, "--tiktoken-pattern", "v2"], lambda text: [SPECIAL + token for token in own.encode(text)]


@pytest.mark.parametrize("train", [sentencepiece_model, hugging_face_folder, tiktoken_file])
def test_a_data_set_has_the_tokens_of_the_library(
    train: Callable[[Path], tuple[list[str], Callable[[str], list[int]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, encode = train(tmp_path)
    texts = ["Each document gets as many ranks as it needs.", "naïve 長い\n\tx = 1"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--output", str(tmp_path / "out"), "--from", str(tmp_path / "in.jsonl"), "--tokenizer-type", *kind]
    assert main(["corpus", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["training_flags"] == ["--data-path", str(tmp_path / "out"), "--tokenizer-type", *kind]
    documents = IndexedDataset(str(tmp_path / "out"))
    assert [list(document) for document in documents] == [[*encode(text), told["eod"]] for text in texts]
    assert check_indexed_dataset(str(tmp_path / "out")).num_documents == len(texts)
