"""A failure during training ends every rank soon, with a message of its reason."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.training import HDP, MODEL, TRAIN, record_steps, train_ranks, train_to_failure, train_with
from tests.sample import sampled

pytestmark = pytest.mark.ranks

PEER_IS_GONE = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed")


def die(rank: int, step: int, runtime: Any, model: Any) -> None:
    if runtime.rank == rank and runtime.step.batch.step_index + 1 == step:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("sharded", sampled([False, True], [True]), ids=["replicated", "zero1-overlap"])
def test_a_killed_rank_ends_the_others(sharded: bool, corpus: Path, tmp_path: Path) -> None:
    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split() if sharded else []
    common = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, *flags]
    errors = train_to_failure(4, *common, entry=partial(train_with, partial(die, 1, 3)), folder=tmp_path)
    assert errors[1] is None
    for rank in (0, 2, 3):
        error = errors[rank]
        assert error is not None
        last = error.splitlines()[-1]
        assert PEER_IS_GONE.search(last), error
        named = r"(over ranks [\d, ]+|with HDP ranks? [\d, ]+|a collective) .*failed: .*--distributed-timeout"
        assert re.search(rf"PeerLost: rank {rank}, step 3: .*{named}", last), last


def poison(rank: int, step: int, runtime: Any, model: Any) -> None:
    """Entry that makes every loss of an HDP rank NaN from ``step`` on."""
    if runtime.rank == rank and runtime.step.batch.step_index + 1 == step:
        next(model.parameters()).data.fill_(float("nan"))


def poison_with_slow_planner(rank: int, step: int) -> None:
    """Entry like ``poison`` that makes every plan after the first in a separate process, which cannot be pickled."""
    from megatron.bytescale.features.hdp import build as hdp

    hdp.PlannerInProcess = partial(hdp.PlannerInProcess, slow_seconds=-1.0)
    train_with(partial(poison, rank, step))


@pytest.mark.full
def test_nan_loss_stops_as_megatron_does_and_names_the_documents(corpus: Path, tmp_path: Path) -> None:
    """Megatron runs the step again with the same result, saves a checkpoint of the previous step and exits with 16.

    A run that goes on from there runs the same step with the same plan.
    """
    common = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-tokens-per-rank", 128]
    common += ["--save", tmp_path, "--ckpt-format", "torch_dist"]
    outcomes = train_ranks(2, *common, entry=partial(train_with, partial(poison, 1, 3)))
    assert [outcome.code for outcome in outcomes] == [16] * 2
    assert len(outcomes[-1].losses) == 2
    named = re.search(r"nan loss in the documents (\S*): document (\d+) tokens \d+-\d+", outcomes[1].text)
    assert named is not None, outcomes[1].text
    assert named[1] == str(corpus)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    again = train_ranks(2, *common, "--load", tmp_path, entry=record_steps)
    assert [outcome.code for outcome in again] == [16] * 2, again[0].text[-2000:]
    assert [record["iteration"] for record in again[1].records()] == [3]
    assert "Got rescheduled on the same GPU" in again[1].text  # so Megatron found the documents of the fault again
    healed = train_ranks(2, *common, "--load", tmp_path, "--rerun-mode", "disabled", entry=record_steps)
    assert healed[1].records() == again[1].records()
    assert [outcome.code for outcome in healed] == [None] * 2


def test_a_fault_is_saved_beside_a_planning_process_with_stages_and_slices(corpus: Path, tmp_path: Path) -> None:
    """The checkpoint holds nothing of the step, which refers to what cannot be pickled."""
    layout = "--hdp-tokens-per-rank 256 --pipeline-model-parallel-size 2 --seq1f1b-slices 2".split()
    saving = ["--save", tmp_path, "--ckpt-format", "torch_dist"]
    entry = partial(poison_with_slow_planner, 0, 3)
    outcomes = train_ranks(2, *MODEL, *TRAIN, "--data-path", corpus, *HDP, *layout, *saving, entry=entry)
    assert [outcome.code for outcome in outcomes] == [16] * 2, outcomes[0].text[-2000:]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.full
def test_nan_loss_without_reruns_is_an_error_that_names_the_documents(corpus: Path, tmp_path: Path) -> None:
    common = [*MODEL, *TRAIN, "--data-path", corpus, *HDP, "--rerun-mode", "disabled"]
    errors = train_to_failure(4, *common, entry=partial(train_with, partial(poison, 2, 3)), folder=tmp_path)
    last_lines = [error.splitlines()[-1] for error in errors if error is not None]
    assert len(last_lines) == 4
    assert f"nan loss in the documents {corpus}: document " in last_lines[2]
    for line in last_lines:
        assert PEER_IS_GONE.search(line) or "nan loss in the documents" in line, line


def train_unscanned() -> None:
    """A token is damaged after the scan at the start."""
    import pretrain_gpt_hdp
    from megatron.bytescale.features.hdp import build as hdp

    hdp.check_data = lambda *args, **kwargs: None
    pretrain_gpt_hdp.main()


@pytest.mark.full
def test_an_error_while_reading_ahead_ends_every_rank(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "docs", lengths=(20, 40, 64, 30, 50, 12, 9, 60) * 3, copies=1)
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r+")
    tokens[-3] = 999  # in document 23
    tokens.flush()
    flags = [*MODEL, *TRAIN, "--data-path", prefix, *HDP, "--train-iters", 3]
    errors = train_to_failure(4, *flags, entry=train_unscanned, folder=tmp_path)
    last_lines = [error.splitlines()[-1] for error in errors if error is not None]
    assert len(last_lines) == 4
    causes = [line for line in last_lines if line.startswith("ValueError: ")]
    assert len(causes) == 1  # only this rank has the document
    assert f"{prefix}: document 23 tokens 0-60: token 57 of the sample has the id 999" in causes[0]
    for line in last_lines:
        assert line in causes or PEER_IS_GONE.search(line), line
