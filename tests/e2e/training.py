"""Real training in the ranks of a test, with the output and files of Megatron.

``entry`` arguments are functions that replace ``pretrain_gpt_hdp.main`` in each rank. They are pickled by name, so they
are functions of a module, or a ``functools.partial`` of such a function.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.e2e.corpora import VOCAB
from tests.e2e.devices import run_trainings
from tests.e2e.once import once
from tests.e2e.tested import note

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --seq-length 256 --max-position-embeddings 256"
).split()
# The opposite of every choice in MODEL. Megatron's fused GELU, which CPUs do not have, is an approximation.
CLASSIC_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization LayerNorm --no-bias-gelu-fusion "
    "--position-embedding-type learned_absolute --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --seq-length 256 --max-position-embeddings 256"
).split()
TRAIN = (
    "--global-batch-size 8 --train-iters 3 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-decay-iters 10 "
    "--clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval 1000 --save-interval 1000 "
    "--num-workers 0 --split 100,0,0 --no-one-logger --ckpt-format torch"
).split()
HDP = "--hybrid-data-parallel --hdp-tokens-per-rank 64 --hdp-plan-ahead 1".split()


@dataclass(frozen=True)
class Outcome:
    """Result of one rank: its exit code, its printed text and the losses in it."""

    code: int | None
    text: str

    @property
    def losses(self) -> list[float]:
        """lm loss of each logged iteration."""
        return [float(value) for value in re.findall(r"iteration +\d+/.*lm loss: ([-\d.E+naif]+)", self.text)]

    @property
    def validation_losses(self) -> list[float]:
        """lm loss of each evaluation."""
        return [float(value) for value in re.findall(r"lm loss value: ([-\d.E+naif]+)", self.text)]

    def records(self, training: bool = True) -> list[dict[str, Any]]:
        """Return the records that ``record_steps`` made of this rank's steps, of training or of evaluation."""
        records = [json.loads(line) for line in re.findall(r"^RECORD (.*)$", self.text, re.MULTILINE)]
        return [record for record in records if record["training"] == training]


def train(num_ranks: int, *flags: object, entry: Callable[[], None] | None = None) -> Outcome:
    """Train with ``pretrain_gpt_hdp.py`` on ``num_ranks`` ranks, check exit codes, and return the last rank's result.

    ``entry`` replaces ``pretrain_gpt_hdp.main``, for example by the oracle.
    """
    return train_ranks(num_ranks, *flags, entry=entry)[-1]


def train_ranks(num_ranks: int, *flags: object, entry: Callable[[], None] | None = None) -> list[Outcome]:
    """Train like ``train``, and return the results of all ranks."""
    argv = ["pretrain_gpt_hdp.py", *map(str, flags)]
    outcomes: list[Outcome] = run_trainings(train_in_process, num_ranks, argv, entry)
    assert len({outcome.code for outcome in outcomes}) == 1, outcomes
    if not outcomes[0].code:
        note(argv)
    return outcomes


@dataclass(frozen=True)
class SavedRun:
    """A run made once in a test session: the results of all ranks, and the folder with the gradients of each step."""

    outcomes: list[Outcome]
    save: Path

    @property
    def losses(self) -> list[float]:
        """lm loss of each logged iteration."""
        return self.outcomes[-1].losses


def train_once(num_ranks: int, *flags: object, entry: Callable[[], None] | None = None) -> SavedRun:
    """Train like ``train_ranks`` and save gradients. Tests of a session with equal flags share one run."""

    def run(folder: Path) -> SavedRun:
        saving = ["--save", folder, "--save-wgrads-interval", 1]
        return SavedRun(train_ranks(num_ranks, *flags, *saving, entry=entry), folder)

    return once(run, "train", num_ranks, [str(flag) for flag in flags], name_of(entry))


def name_of(entry: Any) -> str:
    """Return the name of an entry, with its arguments if it is a ``partial``."""
    if isinstance(entry, functools.partial):
        return f"{name_of(entry.func)} {[name_of(one) for one in entry.args]} {entry.keywords}"
    return f"{entry.__module__}.{entry.__qualname__}" if callable(entry) else repr(entry)


def train_apart(*runs: Sequence[object], entry: Callable[[], None] | None = None) -> list[Outcome]:
    """Train each run's flags in a separate process of world size 1, all at the same time."""
    argvs = [["pretrain_gpt_hdp.py", *map(str, flags)] for flags in runs]
    outcomes: list[Outcome] = run_trainings(_train_apart, len(runs), argvs, entry, init_group=False)
    return outcomes


def _train_apart(rank: int, world: int, argvs: list[list[str]], entry: Callable[[], None] | None) -> Outcome:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return train_in_process(0, 1, argvs[rank], entry)


def train_to_failure(num_ranks: int, *flags: object, entry: Callable[[], None], folder: Path) -> list[str | None]:
    """Train a run that fails, and return the traceback of each rank, or None for a killed rank.

    A failed rank ends its process immediately, and the test does not end other ranks. Raises TimeoutError if a rank
    hangs.
    """
    argv = ["pretrain_gpt_hdp.py", *map(str, flags)]
    ranks = range(num_ranks)
    outcomes = run_trainings(_train_alone, num_ranks, argv, entry, str(folder), may_die=ranks)
    assert outcomes == [None] * num_ranks, f"ranks that did not fail: {outcomes}"
    files = [folder / f"rank{rank}.txt" for rank in ranks]
    return [file.read_text() if file.exists() else None for file in files]


def _train_alone(rank: int, world: int, argv: list[str], entry: Callable[[], None], folder: str) -> Outcome:
    try:
        return train_in_process(rank, world, argv, entry)
    except BaseException:
        Path(folder, f"rank{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # a failed process must not stay connected to its peers, unlike a rank of the harness


def train_in_process(rank: int, world: int, argv: list[str], entry: Callable[[], None] | None) -> Outcome:
    import pretrain_gpt_hdp

    plan_in_process(False)
    sys.argv = argv
    text = io.StringIO()
    code: int | None = None
    logging.basicConfig(stream=text, level=logging.INFO, force=True)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            (entry or pretrain_gpt_hdp.main)()
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        except BaseException:
            sys.__stdout__.write(text.getvalue()[-3000:])
            raise
    return Outcome(code, text.getvalue())


def plan_in_process(wanted: bool) -> None:
    """Make this rank's plans in a separate process or always in this process, independent of the machine's speed."""
    from bytescale_ext.data.loading.planning import PlannerInProcess

    PlannerInProcess.__init__.__defaults__ = (-math.inf if wanted else math.inf,)  # type: ignore[misc]


def train_with(action: Callable[[Any, torch.nn.Module], None]) -> None:
    """Entry (by ``partial``) that calls ``action(runtime, model)`` in each step before the first forward pass."""
    import pretrain_gpt_hdp
    from megatron.bytescale.features.hdp import build as hdp

    original = hdp.forward_step

    def forward_step(runtime: Any) -> Callable[..., Any]:
        forward = original(runtime)
        begun: Any = None

        def forward_with_action(data_iterator: Any, model: torch.nn.Module) -> Any:
            nonlocal begun
            if runtime.step.batch is not begun:
                begun = runtime.step.batch
                action(runtime, model)
            return forward(data_iterator, model)

        return forward_with_action

    hdp.forward_step = forward_step
    pretrain_gpt_hdp.main()


def record_steps() -> None:
    """Entry that records each step of this rank for ``Outcome.records``."""
    train_with(print_step)


def print_step(runtime: Any, model: torch.nn.Module) -> None:
    """Print the record of a step for ``Outcome.records``: its samples and this rank's part."""
    step = runtime.step.batch
    documents = {
        shard.seq: name
        for packed in step.micro_batches
        for shard, name in zip(packed.micro_batch.shards, packed.documents, strict=True)
    }
    record = {
        "training": model.training,
        "iteration": step.step_index + 1,
        "sample_ids": list(step.sample_ids),
        "lengths": list(step.lengths),
        "documents": documents,
        "num_micro_batches": len(step.micro_batches),
        "num_rows": sum(packed.num_rows for packed in step.micro_batches),
    }
    print(f"RECORD {json.dumps(record)}")


def documents_in_order(outcomes: Sequence[Outcome], training: bool = True) -> list[list[str]]:
    """Return the documents of each step in the order of its sequences, assembled from the parts of all ranks."""
    steps = []
    for of_ranks in zip(*(outcome.records(training) for outcome in outcomes), strict=True):
        assert len({tuple(record["sample_ids"]) for record in of_ranks}) == 1, of_ranks
        merged: dict[str, str] = {}
        for record in of_ranks:
            assert all(merged.get(seq, name) == name for seq, name in record["documents"].items()), of_ranks
            merged.update(record["documents"])
        steps.append([merged[str(seq)] for seq in range(len(merged))])
    return steps


def step_losses(log_dir: Path, name: str = "lm loss") -> list[float]:
    """Return a loss of each step, unrounded, from ``metrics.jsonl`` (with ``--log-interval 1``).

    Megatron's own log line after the second step of a run shows the mean of the first two.
    """
    rows = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows]
