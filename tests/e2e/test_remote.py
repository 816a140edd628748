"""Training on text that Ray actors tokenize: the same steps, to the last bit, as after ``bytescale corpus``."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.text_files import write_text
from tests.e2e.training import (
    HDP,
    MODEL,
    TRAIN,
    VOCAB,
    Outcome,
    documents_in_order,
    print_step,
    record_steps,
    step_losses,
    train_ranks,
    train_with,
)
from tests.harness import preload, run_ranks

# Ranks unpickle functions of this module, and Ray must not be imported before its settings are known.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

BYTES = [flag if flag != str(VOCAB) else "257" for flag in MODEL]
EVALUATE = "--split 70,20,10 --eval-interval 2 --eval-iters 1".split()
TRAINED_STEPS = 6


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files of text, each beside its data set of Megatron's, which ends in no ``.jsonl``."""
    folder = tmp_path_factory.mktemp("texts")
    paths = write_text(folder / "a.jsonl", 150, longest=600), write_text(folder / "b.jsonl", 90, seed=1)
    preload("tests.e2e.preload")
    run_ranks(_write_corpora, 1, paths, init_group=False)
    return paths


def _write_corpora(rank: int, world: int, paths: tuple[Path, ...]) -> None:
    from megatron.bytescale.core.datasets import corpus

    for path in paths:
        corpus.write_corpus(str(path.with_suffix("")), corpus.source_entries([str(path)], "*"))


def run(log_dir: Path, num_ranks: int, *flags: object, loader: str = "ray", entry: Any = record_steps) -> list[Outcome]:
    return train_ranks(num_ranks, *BYTES, *TRAIN, "--train-iters", TRAINED_STEPS, *HDP, "--hdp-tokens-per-rank", 128,
                       "--hdp-loader", loader, "--hdp-log-dir", log_dir, *flags, entry=entry)  # fmt: skip


def prefixes(paths: tuple[Path, ...], loader: str) -> list[Path]:
    return [path if loader == "ray" else path.with_suffix("") for path in paths]


def without_suffix(steps: list[list[str]]) -> list[list[str]]:
    return [[document.replace(".jsonl:", ":") for document in step] for step in steps]


@pytest.fixture(scope="module")
def local(texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], list[float]]:
    """Documents and losses of the local loader on the first file."""
    log_dir = tmp_path_factory.mktemp("local")
    outcomes = run(log_dir, 2, "--data-path", texts[0].with_suffix(""), loader="local")
    return documents_in_order(outcomes), step_losses(log_dir)


def test_blends_splits_and_evaluation_are_those_of_the_local_loader(texts: tuple[Path, Path], tmp_path: Path) -> None:
    found = []
    for loader in ("local", "ray"):
        first, second = prefixes(texts, loader)
        flags = ["--data-path", 0.75, first, 0.25, second, *EVALUATE, "--data-cache-path", tmp_path / "cache" / loader]
        outcomes = run(tmp_path / loader, 2, *flags, loader=loader)
        documents = [without_suffix(documents_in_order(outcomes, training)) for training in (True, False)]
        found.append((documents, step_losses(tmp_path / loader), outcomes[-1].validation_losses))
    assert found[0] == found[1]
    assert len(found[0][2]) == 5  # after 2, 4 and 6 iterations, at the end, and on the test set
    assert len(list((tmp_path / "cache" / "ray").glob("*-lines.npz"))) == 2


def kill_actors(runtime: Any, model: Any) -> None:
    """End a server before one step and the scheduler before another, as a fault would."""
    print_step(runtime, model)
    if runtime.rank == 0 and runtime.step.step_index in (1, 3):
        import ray

        from bytescale_ext.data.remote import fetch, join_actors  # noqa: F401

        actor = ray.get_actor("server-0" if runtime.step.step_index == 1 else "scheduler")
        os.kill(fetch(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        print("KILLED")


def test_killed_actors_and_a_resumed_run_change_nothing(
    texts: tuple[Path, Path], local: tuple[list[list[str]], list[float]], tmp_path: Path
) -> None:
    """Four steps in which a server and then the scheduler are killed, and then the rest on as many ranks again."""
    documents, losses = local
    flags = ["--data-path", texts[0], "--hdp-plan-ahead", 1]
    entry = partial(train_with, kill_actors)
    begun = run(tmp_path, 2, *flags, "--save", tmp_path / "save", "--exit-interval", 4, entry=entry)
    assert begun[0].text.count("KILLED") == 2
    assert without_suffix(documents_in_order(begun)) == documents[:4]
    resumed = run(tmp_path, 2, *flags, "--load", tmp_path / "save")
    assert without_suffix(documents_in_order(resumed)) == documents[4:]
    assert step_losses(tmp_path) == losses


def refused(texts: tuple[Path, Path], *flags: object) -> str:
    """The one line of a run that is refused with exit code 2, before anything is built."""
    common = [*BYTES, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--data-path", texts[0], "--hdp-loader", "ray"]
    (outcome,) = train_ranks(1, *common, *flags, timeout=150)
    assert outcome.code == 2 and not outcome.losses, outcome.text[-2000:]
    assert "Traceback" not in outcome.text
    (line,) = re.findall(r"^pretrain_gpt_hdp.py: error: (.*)$", outcome.text, re.MULTILINE)
    return str(line)


def test_what_can_be_known_at_start_is_refused_there(texts: tuple[Path, Path], tmp_path: Path) -> None:
    missing, other, bad = tmp_path / "none.jsonl", tmp_path / "text.txt", tmp_path / "bad.jsonl"
    other.write_text("text")
    bad.write_text('{"text": "a"}\n{"body": "b"}\n')
    assert f"{missing}: no such file" in refused(texts, "--data-path", missing)
    assert f"{other}: --hdp-loader ray reads .jsonl files" in refused(texts, "--data-path", other)
    assert "--hdp-ray-address 127.0.0.1:1: nothing answers" in refused(texts, "--hdp-ray-address", "127.0.0.1:1")
    assert f"{bad}:2: no text under the key 'text'" in refused(texts, "--data-path", bad)
    assert "--hdp-ray-servers must be at least 1, got 0" in refused(texts, "--hdp-ray-servers", 0)
    assert "--hdp-json-key needs --hdp-loader ray" in refused(texts, "--hdp-json-key", "a", "--hdp-loader", "local")


def test_text_of_another_vocabulary_ends_the_run(texts: tuple[Path, Path], tmp_path: Path) -> None:
    """Megatron's own tokenizer in the servers, and the key of the flag; a bad id names its document."""
    path = tmp_path / "ids.jsonl"
    ids = np.arange(8 * 40).reshape(8, 40) % (VOCAB - 1)
    ids[5, 7] = 99999
    path.write_text("".join(f'{{"ids": "{" ".join(map(str, row))}"}}\n' for row in ids))
    common = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--data-path", path, "--hdp-loader", "ray"]
    with pytest.raises(Exception, match="document 5 tokens 0-41: token 7 of the sample has the id 99999"):
        train_ranks(1, *common, "--hdp-json-key", "ids", "--train-iters", 1, timeout=150)
