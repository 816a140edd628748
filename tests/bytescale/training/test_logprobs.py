"""The file of log-probabilities and the progress of a run, in folders that others can write to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.sidecar import VALUES, identity_of
from megatron.bytescale.training.logprobs import PROGRESS, DocumentsInOrder, Progress, Recorder, Task
from tests.data.sources import write_data_set


@pytest.fixture
def task(tmp_path: Path) -> Task:
    prefix = write_data_set(tmp_path / "docs", [[[1, 2, 3]], [[4, 5]]])
    return Task(prefix, str(tmp_path / "out" / "logprobs"), "model", 2)


def begun(task: Task) -> Recorder:
    recorder = Recorder(task, DocumentsInOrder(task.prefix), Progress.of(task))
    recorder.begin()
    return recorder


def note(task: Task, num_documents: object) -> None:
    """Write the progress of a killed run."""
    values = {"model": "model", "data_sha256": identity_of(task.prefix), "num_documents": num_documents}
    Path(task.output + PROGRESS).write_text(json.dumps(values))


def test_a_link_at_the_name_of_the_numbers_is_replaced_and_never_written_through(task: Task, tmp_path: Path) -> None:
    values, target = Path(task.output + VALUES), tmp_path / "target"
    precious = b"precious" * 2 + b"file"
    target.write_bytes(precious)
    values.parent.mkdir()
    values.symlink_to(target)
    recorder = begun(task)
    assert not values.is_symlink()
    recorder.overwrite([(np.array([1.0, 4.0]), np.array([-0.5, -2.0]))])
    assert np.fromfile(values, np.float32).tolist() == [0, -0.5, 0, 0, -2]
    values.unlink()
    values.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        recorder.overwrite([(np.array([0.0]), np.array([1.0]))])
    note(task, 1)
    with pytest.raises(ValueError, match="is a link, whose target is not overwritten"):
        begun(task)
    assert target.read_bytes() == precious


@pytest.mark.parametrize("number", [-1, 3, 2**70, True, 1.5, "1", None, [1]])
def test_a_damaged_progress_is_refused(number: object, task: Task) -> None:
    begun(task)
    note(task, number)
    with pytest.raises(ValueError, match="not the progress of a run"):
        Progress.of(task)


def test_a_killed_run_goes_on(task: Task) -> None:
    begun(task).overwrite([(np.array([1.0]), np.array([-0.5]))])
    note(task, 1)
    assert begun(task).done.num_documents == 1
    assert np.fromfile(task.output + VALUES, np.float32)[1] == -0.5
