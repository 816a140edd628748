"""Training on text that Ray actors tokenize has the same steps, bit for bit, as after ``bytescale corpus``."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.data.text_files import write_text
from tests.e2e.corpora import VOCAB
from tests.e2e.oracle import draw_weights_by_name
from tests.e2e.training import (
    HDP,
    MODEL,
    TRAIN,
    Outcome,
    documents_in_order,
    print_step,
    step_losses,
    train_apart,
    train_ranks,
    train_with,
)
from tests.harness import free_port, run_ranks

# Ranks unpickle functions of this module, and Ray must not be imported before its settings are known.
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

BYTES = [flag if flag != str(VOCAB) else "257" for flag in MODEL]
EVALUATE = "--split 70,20,10 --eval-interval 2 --eval-iters 1".split()
TRAINED_STEPS = 6


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two text files and their data sets in Megatron's format, whose names do not end in ``.jsonl``."""
    folder = tmp_path_factory.mktemp("texts")
    paths = write_text(folder / "a.jsonl", 150, longest=600), write_text(folder / "b.jsonl", 90, seed=1)
    run_ranks(_write_corpora, 1, paths, init_group=False)
    return paths


def _write_corpora(rank: int, world: int, paths: tuple[Path, ...]) -> None:
    from bytescale_ext.data.samples.sources import source_entries
    from megatron.bytescale.core.datasets import corpus

    for path in paths:
        corpus.write_corpus(str(path.with_suffix("")), source_entries([str(path)], "*"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray cluster of one node, as a user starts it."""
    for _ in range(3):  # Ray gives its processes 30 s to start, which a busy machine may exceed
        address, process, log = start_cluster(tmp_path_factory.mktemp("cluster"))
        if process.poll() is None:
            break
    assert process.poll() is None, log.read_text()
    yield address
    started = [process, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    for alive in psutil.wait_procs(started, timeout=30)[1]:
        alive.kill()


def start_cluster(folder: Path) -> tuple[str, subprocess.Popen[bytes], Path]:
    """Address, process and log of a cluster; the process has ended if it cannot start."""
    port = free_port()
    log = folder / "ray.log"
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
               f"--port={port}", "--num-cpus=0", "--include-dashboard=false", "--object-store-memory=100000000",
               ]  # fmt: skip
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    while "ray start --address" not in log.read_text() and process.poll() is None:
        time.sleep(0.1)
    return f"127.0.0.1:{port}", process, log


def record(action: Any = print_step) -> None:
    """Entry that records each step of a rank. All layouts start from equal weights."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # like the cluster
    draw_weights_by_name()
    train_with(action)


def run(log_dir: Path, num_ranks: int, *flags: object, loader: str = "ray", entry: Any = record) -> list[Outcome]:
    """Train with one server. ``test_blends_splits_and_evaluation...`` has two servers."""
    servers = ["--hdp-ray-servers", 1] if loader == "ray" else []
    return train_ranks(num_ranks, *BYTES, *TRAIN, "--train-iters", TRAINED_STEPS, *HDP, "--hdp-tokens-per-rank", 128,
                       "--hdp-loader", loader, *servers, "--hdp-log-dir", log_dir, *flags, entry=entry)  # fmt: skip


def prefixes(paths: tuple[Path, ...], loader: str) -> list[Path]:
    return [path if loader == "ray" else path.with_suffix("") for path in paths]


def without_suffix(steps: list[list[str]]) -> list[list[str]]:
    return [[document.replace(".jsonl:", ":") for document in step] for step in steps]


@pytest.fixture(scope="module")
def local(texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], list[float]]:
    """Return documents and losses of the local loader on the first file."""
    log_dir = tmp_path_factory.mktemp("local")
    outcomes = run(log_dir, 2, "--data-path", texts[0].with_suffix(""), loader="local")
    return documents_in_order(outcomes), step_losses(log_dir)


@pytest.mark.full
def test_blends_splits_and_evaluation_are_those_of_the_local_loader(texts: tuple[Path, Path], tmp_path: Path) -> None:
    found = []
    for loader in ("local", "ray"):
        first, second = prefixes(texts, loader)
        flags = ["--data-path", 0.75, first, 0.25, second, *EVALUATE, "--data-cache-path", tmp_path / "cache" / loader]
        servers = ["--hdp-ray-servers", 2] if loader == "ray" else []
        outcomes = run(tmp_path / loader, 2, *flags, *servers, loader=loader)
        documents = [without_suffix(documents_in_order(outcomes, training)) for training in (True, False)]
        found.append((documents, step_losses(tmp_path / loader), outcomes[-1].validation_losses))
    assert found[0] == found[1]
    assert len(found[0][2]) == 5  # after 2, 4 and 6 iterations, at the end, and on the test set
    assert len(list((tmp_path / "cache" / "ray").glob("*-lines.npz"))) == 2


def kill_actors(runtime: Any, model: Any) -> None:
    """Kill a server before one step and the scheduler before another."""
    print_step(runtime, model)
    if runtime.rank == 0 and runtime.step.batch.step_index in (1, 3):
        import ray

        from bytescale_ext.data.ray.fetching import fetch

        actor = ray.get_actor("server-0" if runtime.step.batch.step_index == 1 else "scheduler")
        os.kill(fetch(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        print("KILLED")


def test_steps_are_those_of_the_local_loader(
    texts: tuple[Path, Path], local: tuple[list[list[str]], list[float]], cluster: str, tmp_path: Path
) -> None:
    documents, losses = local
    flags = ["--data-path", texts[0], "--hdp-plan-ahead", 1, "--hdp-ray-address", cluster, "--exit-interval", 2]
    assert without_suffix(documents_in_order(run(tmp_path, 2, *flags))) == documents[:2]
    assert step_losses(tmp_path) == losses[:2]


@pytest.mark.full
def test_killed_actors_and_a_resumed_run_change_nothing(
    texts: tuple[Path, Path], local: tuple[list[list[str]], list[float]], cluster: str, tmp_path: Path
) -> None:
    """Four steps run while a server and then the scheduler are killed. The same number of ranks then runs the rest."""
    documents, losses = local
    flags = ["--data-path", texts[0], "--hdp-plan-ahead", 1, "--hdp-ray-address", cluster]
    entry = partial(record, kill_actors)
    begun = run(tmp_path, 2, *flags, "--save", tmp_path / "save", "--exit-interval", 4, entry=entry)
    assert begun[0].text.count("KILLED") == 2
    assert without_suffix(documents_in_order(begun)) == documents[:4]
    resumed = run(tmp_path, 2, *flags, "--load", tmp_path / "save")
    assert without_suffix(documents_in_order(resumed)) == documents[4:]
    assert step_losses(tmp_path) == losses


def poison(runtime: Any, model: Any) -> None:
    """Entry that makes every loss NaN from the third step on."""
    if runtime.step.batch.step_index == 2:
        next(model.parameters()).data.fill_(float("nan"))


@pytest.mark.full
def test_a_fault_is_saved_with_a_step_that_ray_made(texts: tuple[Path, Path], cluster: str, tmp_path: Path) -> None:
    flags = ["--data-path", texts[0], "--hdp-ray-address", cluster, "--save", tmp_path / "save"]
    words = [*flags, "--hdp-tokens-per-rank", 256, "--ckpt-format", "torch_dist"]
    (outcome,) = run(tmp_path, 1, *words, entry=partial(record, poison))
    assert outcome.code == 16, outcome.text[-2000:]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "figure"),
    [
        ("--mtp-num-layers 2", "mtp_2 loss"),
        ("--draft-heads clover --ckpt-format torch_dist --pretrained-checkpoint MODEL", "draft loss"),
    ],
)
def test_heads_get_later_tokens(
    heads: str, figure: str, texts: tuple[Path, Path], cluster: str, tmp_path: Path
) -> None:
    losses, model = [], tmp_path / "model"
    if "MODEL" in heads:
        data = ["--data-path", prefixes(texts, "local")[0], "--exit-interval", 1]
        run(tmp_path, 2, *data, "--save", model, "--ckpt-format", "torch_dist", loader="local")
    for loader, flags in (("local", []), ("ray", ["--hdp-ray-address", cluster])):
        path = prefixes(texts, loader)[0]
        words = ["--data-path", path, *flags, *heads.replace("MODEL", str(model)).split(), "--exit-interval", 2]
        outcomes = run(tmp_path / loader, 2, *words, loader=loader)
        assert outcomes[0].code in (None, 0), outcomes[0].text[-2000:]
        losses.append(step_losses(tmp_path / loader, figure))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


@pytest.mark.full
def test_pipeline_stages_and_tensor_parallel_ranks_get_their_part(
    texts: tuple[Path, Path], local: tuple[list[list[str]], list[float]], cluster: str, tmp_path: Path
) -> None:
    """Two stages of two tensor-parallel ranks have the documents and losses of the local loader."""
    documents, losses = local
    layout = ["--pipeline-model-parallel-size", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel",
              "--make-vocab-size-divisible-by", 64, "--hdp-tokens-per-rank", 256]  # fmt: skip
    flags = ["--data-path", texts[0], "--hdp-ray-address", cluster, *layout, "--exit-interval", 3]
    outcomes = run(tmp_path, 4, *flags)
    assert without_suffix(documents_in_order(outcomes)) == documents[:3]
    assert step_losses(tmp_path) == pytest.approx(losses[:3], rel=1e-5)


@pytest.mark.full
def test_what_can_be_known_at_start_is_refused_there(texts: tuple[Path, Path], cluster: str, tmp_path: Path) -> None:
    """The exit code is 2, with a message of one line, before anything is built."""
    missing, other, bad = tmp_path / "none.jsonl", tmp_path / "text.txt", tmp_path / "bad.jsonl"
    other.write_text("text")
    bad.write_text('{"text": "a"}\n{"body": "b"}\n')
    said = {
        (missing, cluster): f"{missing}: no such file",
        (other, cluster): f"{other}: --hdp-loader ray reads files of JSON and Parquet",
        (texts[0], "127.0.0.1:1"): "--hdp-ray-address 127.0.0.1:1: cannot connect",
        (bad, cluster): f"{bad}:2: no text under the key 'text'",
    }
    common = [*BYTES, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--hdp-loader", "ray"]
    runs = [[*common, "--data-path", path, "--hdp-ray-address", address] for path, address in said]
    for outcome, expected in zip(train_apart(*runs, entry=record), said.values(), strict=True):
        assert (outcome.code, list(outcome.losses)) == (2, []), outcome.text[-2000:]
        assert "Traceback" not in outcome.text
        (line,) = re.findall(r"^pretrain_gpt_hdp.py: error: (.*)$", outcome.text, re.MULTILINE)
        assert expected in line


@pytest.mark.full
def test_text_of_another_vocabulary_ends_the_run(cluster: str, tmp_path: Path) -> None:
    """Servers use Megatron's own tokenizer and the key of the flag. The error for an invalid id names its document."""
    path = tmp_path / "ids.jsonl"
    ids = np.arange(8 * 40).reshape(8, 40) % (VOCAB - 1)
    ids[5, 7] = 99999
    path.write_text("".join(f'{{"ids": "{" ".join(map(str, row))}"}}\n' for row in ids))
    common = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256, "--data-path", path, "--hdp-loader", "ray"]
    flags = ["--hdp-ray-address", cluster, "--hdp-ray-servers", 1, "--hdp-json-key", "ids", "--train-iters", 1]
    with pytest.raises(Exception, match="document 5 tokens 0-41: token 7 of the sample has the id 99999"):
        train_ranks(1, *common, *flags, entry=record)
