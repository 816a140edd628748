"""Small runs: launch lines, repeated runs, and a real run on each of two sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.mix.weights import MixturePart
from megatron.bytescale.cli.data import proxy
from tests.bytescale.arguments.resolving import resolve_lines
from tests.data.sources import write_data_set

STEPS = 8


@pytest.fixture
def parts(tmp_path: Path) -> list[MixturePart]:
    """Repeated bytes, which are learned quickly, and random bytes, which are not."""
    random = np.random.RandomState(0)
    documents = {
        "again": [[list(range(64)) * 12]] * 60,
        "random": [[random.randint(0, 256, 768).tolist()] for _ in range(60)],
    }
    for name, one in documents.items():
        write_data_set(tmp_path / name, one)
    return [MixturePart(str(tmp_path / name), name, 60 * 768, 60) for name in documents]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_real_run_and_what_it_says(parts: list[MixturePart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one source is trained. For the other, random bytes, the loss of a finished run exists."""
    runs = tmp_path / "runs"
    write_losses(runs / f"random-{STEPS}-0", [5.6] * STEPS)
    found = proxy.proposals_of(proxy.ProxyRuns(tuple(parts), STEPS, 1, runs))
    curve = proxy.read_curve(runs / f"again-{STEPS}-0", STEPS)
    assert curve is not None
    tokens, losses = curve
    assert losses[-1] < losses[0] - 0.1
    assert proxy.STEP_TOKENS / 2 * STEPS < tokens[-1] <= proxy.STEP_TOKENS * STEPS
    assert found is not None
    assert found["again"].gain > found["random"].gain == 0
    # Losses of finished runs are read again, without training.
    monkeypatch.setattr(proxy, "_train", None)
    assert proxy.proposals_of(proxy.ProxyRuns(tuple(parts), STEPS, 1, runs)) == found


@pytest.mark.ranks
def test_the_launch_line_is_one_that_megatron_takes(parts: list[MixturePart], tmp_path: Path) -> None:
    blended = [parts[0], MixturePart(parts[1].prefix, "again", 60 * 768, 60, 2.0)]
    lines = [proxy.command_of(one, STEPS, 3, tmp_path / "log", 300)[4:] for one in ([parts[0]], blended)]
    for outcome in resolve_lines(*((1, line) for line in lines)):
        assert outcome.error is None
    assert lines[0][lines[0].index("--data-path") + 1] == parts[0].prefix
    place = lines[1].index("--data-path")
    assert lines[1][place + 1 : place + 5] == ["60.0", parts[0].prefix, "120.0", parts[1].prefix]
    assert lines[0][lines[0].index("--vocab-size") + 1] == "300"


def write_losses(folder: Path, losses: list[float], text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(
        json.dumps({"lm loss": loss, "tokens_so_far": 100 * step}) + "\n" for step, loss in enumerate(losses, 1)
    )
    (folder / "metrics.jsonl").write_text(rows + text)


def test_only_whole_runs_are_read(tmp_path: Path) -> None:
    assert proxy.read_curve(tmp_path, 2) is None
    write_losses(tmp_path, [3.0], '{"lm loss": 2.')
    assert proxy.read_curve(tmp_path, 2) is None
    write_losses(tmp_path, [3.0, 2.5])
    found = proxy.read_curve(tmp_path, 2)
    assert found is not None
    assert [one.tolist() for one in found] == [[100.0, 200.0], [3.0, 2.5]]


@pytest.mark.parametrize("bad", [[3.0] * 4, [3.0] * 7 + [float("nan")]])
def test_a_run_that_fails_names_its_log(
    bad: list[float], parts: list[MixturePart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_train", lambda _, log, steps: write_losses(log.parent, bad))
    with pytest.raises(ValueError, match=r"a small run has failed: see .*again-8-0/train\.log"):
        proxy.proposals_of(proxy.ProxyRuns(tuple(parts), STEPS, 1, tmp_path / "runs"))


@pytest.mark.slow
def test_the_number_of_tasks_and_a_failed_task_change_nothing(
    parts: list[MixturePart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def train(command: list[str], log: Path, steps: int) -> None:
        calls.append(log.parent.name)
        if len(calls) == 3:
            raise ValueError("killed")
        seed = int(command[command.index("--seed") + 1])
        write_losses(log.parent, [5 - ("again" in log.parent.name) * step**0.5 + seed / 10 for step in range(STEPS)])

    monkeypatch.setattr(proxy, "_train", train)
    runs = [proxy.ProxyRuns(tuple(parts), STEPS, 2, tmp_path / f"runs{tasks}") for tasks in (1, 2, 4)]
    with pytest.raises(ValueError, match="killed"):
        proxy.proposals_of(runs[0], tasks=1)
    found = [proxy.proposals_of(one, tasks=tasks) for one, tasks in zip(runs, (1, 2, 4), strict=True)]
    assert calls[:5] == ["again-8-0", "again-8-1", "random-8-0", "random-8-0", "random-8-1"]
    assert found[0] == found[1] == found[2]


@pytest.mark.ranks
def test_a_process_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a small run has failed"):
        proxy._train(["bash", "-c", "echo broken; exit 3"], tmp_path / "train.log", 1)
    assert (tmp_path / "train.log").read_text() == "broken\n"
