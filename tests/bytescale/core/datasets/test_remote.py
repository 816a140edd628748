"""Parts of the Ray loader's start that need no Ray; tests/e2e/runs/test_remote.py tests the whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.samples.texts import BYTE_LEVEL_EOD, BYTE_LEVEL_VOCAB_SIZE
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def in_one_process(function: Any, *args: Any) -> Any:
    return run_ranks(function, 1, *args, init_group=False)[0]


def refuse_files(rank: int, world: int, folder: Path) -> None:
    from megatron.bytescale.core.datasets.remote import check_line_file, line_files

    (folder / "corpus.idx").touch()
    with pytest.raises(ValueError, match=r"reads text; use --hdp-loader local"):
        check_line_file(str(folder / "corpus"), "text", None)
    with pytest.raises(ValueError, match="no such file: change the data path"):
        check_line_file(str(folder / "absent.jsonl"), "text", None)
    for name, content in (("present.jsonl", b""), ("a.ndjson", b'{"text": "a"}'), ("b", b'{"text": "a"}')):
        (folder / name).write_bytes(content)
        check_line_file(str(folder / name), "text", None)
    (folder / "a.json").write_bytes(b'[{"text": "a"}]')
    with pytest.raises(ValueError, match=r"a\.json: --hdp-loader ray unpacks it: give --data-cache-path"):
        check_line_file(str(folder / "a.json"), "text", None)
    check_line_file(str(folder / "a.json"), "text", folder)
    (file,) = line_files([str(folder / "a.json")], "text", str(folder / "cache"))
    assert Path(file).read_bytes() == b'{"text": "a"}\n'


def test_only_files_of_documents_are_read(tmp_path: Path) -> None:
    in_one_process(refuse_files, tmp_path)


def documents(rank: int, world: int) -> tuple[list[int], list[int]]:
    from megatron.bytescale.core.datasets.remote import LineDataset

    config = SimpleNamespace(lines={"a.jsonl": SimpleNamespace(table_lengths=np.array([5, 0, 7]))})
    made = LineDataset.build_low_level_dataset("a.jsonl", config)  # type: ignore[arg-type]
    return made.sequence_lengths.tolist(), made.document_indices.tolist()


def test_each_line_is_a_document_of_one_sequence() -> None:
    assert in_one_process(documents) == ([5, 0, 7], [0, 1, 2, 3])


def tokenizers(rank: int, world: int, folder: Path) -> list[str]:
    """Bytes are encoded without Megatron. The description of a tokenizer depends on its files."""
    from megatron.bytescale.core.datasets import remote

    def refuse(settings: Any) -> None:
        raise AssertionError("bytes need no Megatron")

    remote.build_encode = refuse
    settings = {"tokenizer_type": "NullTokenizer", "vocab_size": BYTE_LEVEL_VOCAB_SIZE, "tokenizer_model": None}
    tokens, is_utf8 = remote._encode_builder(settings)()(b"ab")
    assert (tokens.tolist(), is_utf8) == ([*b"ab", BYTE_LEVEL_EOD], True)
    file = folder / "model"
    texts = [remote._tokenizer_in_words(settings)]
    for content in ("a", "ab"):
        file.write_text(content)
        texts.append(remote._tokenizer_in_words({**settings, "tokenizer_model": str(file)}))
    return texts


def test_a_tokenizer_is_known_by_its_options_and_files(tmp_path: Path) -> None:
    assert len(set(in_one_process(tokenizers, tmp_path))) == 3
