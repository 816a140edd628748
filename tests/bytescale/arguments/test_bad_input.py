"""Invalid input ends with one clear line and exit code 2, before training starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[3]
MARK = "pretrain_gpt_hdp.py: error: "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", copies=1)


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """Return files that a test may damage."""
    for kind in ("bin", "idx"):
        shutil.copy(f"{corpus}.{kind}", tmp_path / f"docs.{kind}")
    return tmp_path / "docs"


def refusal(outcome: Outcome) -> str:
    """Return the error line of a refused run."""
    assert outcome.code == 2, outcome.text[-2000:]
    assert "Traceback" not in outcome.text
    assert "[before the start of training step]" not in outcome.text
    assert not outcome.losses
    lines = [line for line in outcome.text.splitlines() if MARK in line]
    assert len(lines) == 1, outcome.text[-2000:]
    assert outcome.text.endswith(lines[0] + "\n"), outcome.text[-2000:]
    assert lines[0].startswith(MARK)
    return lines[0].removeprefix(MARK)


def refused(data: Path, *flags: object, entry: Any = None) -> str:
    """Return the error line of a refused run on one rank. Given flags override common flags."""
    common = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--data-path", data]
    return refusal(train(1, *common, *flags, entry=entry))


def assert_has(message: str, *words: object) -> None:
    for word in words:
        assert str(word) in message


def test_the_same_line_without_a_fault_trains(corpus: Path) -> None:
    common = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--data-path", corpus]
    outcome = train(1, *common, "--train-iters", 1, "--global-batch-size", 2)
    assert outcome.code is None
    assert len(outcome.losses) == 1
    assert MARK not in outcome.text


def overwrite(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def use_a_large_token(file: Path) -> None:
    """Change the first token of document 2 to an id outside the 61 + 1 ids, which are padded to 128."""
    tokens = np.memmap(file, dtype=np.uint16, mode="r+")
    tokens[256 + 3] = 60000
    tokens.flush()


# (suffix of the damaged file, damage, words of the message after its name)
DAMAGES: list[tuple[str, Callable[[Path], None], list[object]]] = [
    ("idx", os.remove, ["no such file"]),
    ("bin", os.remove, ["no such file", "copy both files"]),
    ("bin", partial(os.truncate, length=100), [100, "copy"]),
    ("idx", partial(os.truncate, length=100), [100, "copy"]),
    (
        "idx",
        partial(overwrite, content=b"something else"),
        ["not an index file of Megatron", "write the data set again"],
    ),
    ("bin", use_a_large_token, ["document 2", 60000, "vocabulary", "--vocab-size"]),
]


@pytest.mark.parametrize(
    ("kind", "damage", "words"), DAMAGES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_damaged_files(kind: str, damage: Callable[[Path], None], words: list[object], copy: Path) -> None:
    damage(Path(f"{copy}.{kind}"))
    assert_has(refused(copy), copy, *words)


def test_data_set_without_a_token(tmp_path: Path) -> None:
    empty = write_documents(tmp_path / "empty", lengths=(0, 0), copies=1)
    assert_has(refused(empty), empty, "holds no token", "write the data set again")


def test_split_without_a_document(corpus: Path) -> None:
    message = refused(corpus, "--split", "100,0,0", "--eval-iters", 1)
    assert_has(message, "no documents for the valid split", "--split (it is 100,0,0)", "--eval-iters 0")
    message = refused(corpus, "--split", "99,1,0", "--eval-iters", 1)
    assert_has(message, corpus, "valid split of its 24 documents", "--split", "--eval-iters 0")
    assert_has(refused(corpus, "--split", "0,100,0"), "no documents for the train split", "--train-data-path")


def test_no_data_for_evaluation(corpus: Path) -> None:
    flags = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--eval-iters", 1]
    at = flags.index("--split")
    message = refusal(train(1, *flags[:at], *flags[at + 2 :], "--train-data-path", corpus))
    assert_has(message, "no documents for the valid split", "--valid-data-path", "--eval-iters 0")


def test_data_arguments_in_a_file_that_is_missing(tmp_path: Path) -> None:
    flags = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--data-args-path", tmp_path / "none"]
    assert_has(refusal(train(1, *flags)), tmp_path / "none", "No such file")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hdp-tokens-per-rank 64", ["--seq-length 256", "there are 1", "fits is 256"]),
        ("--pipeline-model-parallel-size 2", ["--pipeline-model-parallel-size 2", "start 2 processes"]),
        ("--expert-model-parallel-size 2", ["--expert-model-parallel-size without --num-experts"]),
        ("--hdp-attention-kernel torch_flash", ["'torch_flash'", "runs on cuda, not on cpu"]),
        ("--yaml-cfg settings.yaml", ["--yaml-cfg", "command line"]),
        ("--min-lr 1", ["--min-lr 1", "--lr"]),
        ("--data-path 0.3 a b", ["0.3.idx: no such file"]),
    ],
)
def test_flags(corpus: Path, flags: str, words: list[str]) -> None:
    assert_has(refused(corpus, *flags.split()), *words)


def test_tokens_per_rank_under_sequence_parallelism(corpus: Path) -> None:
    flags = [*MODEL, *TRAIN, *HDP, "--data-path", corpus, "--tensor-model-parallel-size", 2, "--sequence-parallel"]
    message = refusal(train_first_rank(2, *flags, "--hdp-tokens-per-rank", 257))
    assert_has(message, "--hdp-tokens-per-rank 257 is not a multiple of 2", "--tensor-model-parallel-size")
    assert_has(message, "--sequence-parallel", 258)


def train_first_rank(num_ranks: int, *flags: object) -> Outcome:
    """Train like ``train``, and return the output of the first rank, which alone reports invalid input."""
    from tests.e2e.training import train_ranks

    first, *others = train_ranks(num_ranks, *flags)
    assert all(MARK not in outcome.text for outcome in others)
    return first


def with_a_changed_function() -> None:
    import megatron.training.training

    import pretrain_gpt_hdp

    megatron.training.training.training_log = with_a_changed_function
    pretrain_gpt_hdp.main()


def with_a_replaced_alias() -> None:
    import megatron.training.training

    import pretrain_gpt_hdp

    megatron.training.training.get_forward_backward_func = lambda *args, **kwargs: None
    pretrain_gpt_hdp.main()


def test_changed_function(corpus: Path) -> None:
    message = refused(corpus, entry=with_a_changed_function)
    assert_has(message, "megatron.training.training:training_log of megatron-core", "has the source hash",
               "install megatron-core==0.19.2", "patches.py", "make next")  # fmt: skip


def test_function_replaced_by_another_library(corpus: Path) -> None:
    message = refused(corpus, entry=with_a_replaced_alias)
    assert_has(message, "megatron.training.training.get_forward_backward_func", "another library")


@pytest.mark.full
def test_the_command_itself(tmp_path: Path) -> None:
    words = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", "256", "--data-path", str(tmp_path / "none")]
    environment = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    ended = subprocess.run(
        [sys.executable, "pretrain_gpt_hdp.py", "--cpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in environment},
        timeout=400,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"{MARK}{tmp_path / 'none'}.idx: no such file")
    assert "Traceback" not in ended.stderr
