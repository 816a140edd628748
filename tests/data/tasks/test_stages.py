"""Stages on each executor: equal documents, and finished tasks are skipped."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from datatrove.executor.ray import RayPipelineExecutor

from bytescale_ext.data.clean.output import gather
from bytescale_ext.data.clean.recipe import STEPS, Recipe
from bytescale_ext.data.clean.stages import stages_of
from bytescale_ext.data.tasks.stages import ExecutorSettings, Stage, run_stages
from tests.data.cleaning import HEADER, duplicates, folder_of, run_steps, text, told
from tests.sample import sampled

pytestmark = pytest.mark.ranks


def recipe_of(root: Path) -> Recipe:
    bodies = {f"{number}.txt": HEADER + text(number % 4, changed=50 if number > 3 else None) for number in range(6)}
    return Recipe((folder_of(root, "docs", bodies),), tasks=2, buckets=3, hashes=2)


def finish(recipe: Recipe, work: Path, output: Path) -> Callable[..., None]:
    return Finish(recipe, work, output)


class Finish:
    """Last stage of these tests, which a separate process can load."""

    def __init__(self, recipe: Recipe, work: Path, output: Path) -> None:
        self.places = recipe, work, output

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        gather(*self.places)


def run(root: Path, out: str, where: ExecutorSettings, steps: tuple[str, ...] = STEPS) -> set[str]:
    recipe, work = dataclasses.replace(recipe_of(root), steps=steps), root / f"{out}-work"
    run_stages(stages_of(recipe, work, finish(recipe, work, root / out)), work, where)
    return texts_in(root / out)


def texts_in(folder: Path) -> set[str]:
    return {json.loads(line)["text"] for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("policy", ["drop", "weight"])
def test_the_number_of_tasks_changes_no_byte(policy: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe_of(tmp_path), policy=policy)
    (tmp_path / "docs" / "a.txt").write_text(text(1))
    (tmp_path / "docs" / "b.txt").write_text(text(2, changed=3) + "\n" + HEADER)
    found = []
    for tasks in (1, 2, 4):
        work = tmp_path / f"work{tasks}"
        stages = stages_of(dataclasses.replace(recipe, tasks=tasks), work, print)[:-1]
        for stage in stages:
            run_steps(stage.steps, stage.tasks)
        gather(recipe, work, tmp_path / f"out{tasks}")
        found.append((files_in(tmp_path / f"out{tasks}"), duplicates(work), told(work)))
    assert len(found[0][1]) == 4
    assert found[0] == found[1] == found[2]


@pytest.fixture
def expected(tmp_path: Path) -> set[str]:
    found = run(tmp_path, "expected", ExecutorSettings())
    assert len(found) == 4
    assert sum(HEADER in one for one in found) == 1
    return found


@pytest.mark.timeout(300)
@pytest.mark.full
def test_several_processes(tmp_path: Path, expected: set[str]) -> None:
    assert run(tmp_path, "out", ExecutorSettings(workers=2)) == expected


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe without a stage that only adds seconds. Workers do not get the current folder, which has the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    expected = run(tmp_path, "expected", ExecutorSettings(), ("exact",))
    assert run(tmp_path, "out", ExecutorSettings("ray", workers=2), ("exact",)) == expected


def test_ray_gets_the_tasks_and_workers_of_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is not started: this process runs what Ray would run."""
    calls = []

    def run_here(executor: RayPipelineExecutor) -> None:
        calls.append((executor.world_size, executor.workers))
        for rank in range(executor.world_size):
            executor._run_for_rank(rank)

    monkeypatch.setattr("ray.init", lambda *_, **__: None)
    monkeypatch.setattr(RayPipelineExecutor, "run", run_here)
    expected = run(tmp_path, "expected", ExecutorSettings(), ("exact",))
    assert run(tmp_path, "out", ExecutorSettings("ray", workers=1), ("exact",)) == expected
    assert (2, 1) in calls


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "." * 64 + ":1"])
def test_an_address_where_no_ray_is_ends_at_once(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^--ray-address {re.escape(address)}: .*`ray start --head`"):
        run(tmp_path, "out", ExecutorSettings("ray", ray_address=address), ("exact",))


def test_a_ray_that_does_not_start_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own error has several lines."""

    def init(*_: object, **__: object) -> None:
        raise ConnectionError("Ray says\nthat it failed")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ValueError, match=r"^--executor ray: Ray does not start \(Ray says that it failed\)$"):
        run(tmp_path, "out", ExecutorSettings("ray"), ("exact",))


SBATCH = """#!/bin/bash
echo "$@" >> "$CALLS"
cat "${@: -1}" >> "$CALLS"
echo "Submitted batch job $(grep -c '^#!' "$CALLS")"
"""


def test_slurm(tmp_path: Path, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are submitted in order, each after the previous job. Their tasks, run here, give the same documents."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in (("sbatch", SBATCH), ("scontrol", "#!/bin/bash\necho here\n")):
        (tools / name).write_text(body)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    assert run(tmp_path, "out", ExecutorSettings("slurm", slurm=(("partition", "cpu"), ("account", "us")))) == set()
    calls = (tmp_path / "calls").read_text()
    order = [line.partition("=")[2] for line in calls.splitlines() if "--job-name" in line]
    assert order[::2] == order[1::2]  # each stage has a further job that sums its counts
    names = [one.removeprefix("data-") for one in order[::2]]
    assert names == [stage.name for stage in stages_of(recipe_of(tmp_path), tmp_path, print)]
    submitted = [line for line in calls.splitlines() if line.startswith("--export=ALL")]
    assert ["--dependency=afterok:" in line for line in submitted] == [False] + [True] * (len(names) - 1)
    assert "#SBATCH --account=us" in calls
    monkeypatch.setenv("SLURM_NODELIST", "here")
    for name in names:
        folder = tmp_path / "out-work" / "stages" / name
        for task in range(len(json.loads((folder / "ranks_to_run.json").read_text()))):
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
            pickle.loads((folder / "executor.pik").read_bytes()).run()
    assert texts_in(tmp_path / "out") == expected


def test_what_sbatch_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: Memory specification can not be satisfied' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match="collect: sbatch: error: Memory specification can not be satisfied"):
        run(tmp_path, "out", ExecutorSettings("slurm", slurm=(("partition", "cpu"),)))


class Once:
    """Step that fails in its first run, like a killed step, and counts its runs."""

    def __init__(self, path: Path, fails: int | None = None) -> None:
        self.path, self.fails = path, fails

    def __call__(self, data: object, rank: int, world_size: int) -> object:
        runs = len(self.path.read_text()) if self.path.exists() else 0
        self.path.write_text("x" * (runs + 1))
        if runs == self.fails:
            raise RuntimeError("killed")
        return data


class Killed:
    """Step whose process is killed in its first run, as by an operating system without memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, data: object, rank: int, world_size: int) -> object:
        if rank == 1 and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return data


def test_a_killed_process_ends_the_run_and_the_next_run_resumes(tmp_path: Path) -> None:
    recipe, work = dataclasses.replace(recipe_of(tmp_path), steps=("exact",)), tmp_path / "work"
    first, *others = stages_of(recipe, work, finish(recipe, work, tmp_path / "out"))
    stages = [dataclasses.replace(first, steps=[*first.steps, Killed(tmp_path / "killed")]), *others]
    with pytest.raises(ValueError, match="stage collect: a process of a task was killed"):
        run_stages(stages, work, ExecutorSettings(workers=2))
    run_stages(stages, work, ExecutorSettings(workers=2))
    assert texts_in(tmp_path / "out") == run(tmp_path, "expected", ExecutorSettings(), ("exact",))


@pytest.mark.parametrize("broken", sampled(range(9), [0]))
def test_a_killed_run_loses_nothing_and_repeats_nothing(broken: int, tmp_path: Path, expected: set[str]) -> None:
    recipe, work = recipe_of(tmp_path), tmp_path / "work"
    stages = stages_of(recipe, work, finish(recipe, work, tmp_path / "out"))
    counted = [
        Stage(one.name, one.tasks, [*one.steps, Once(tmp_path / one.name, 0 if place == broken else None)])
        for place, one in enumerate(stages)
    ]
    with pytest.raises(ValueError, match=f"stage {stages[broken].name}: RuntimeError: killed; see .*/logs"):
        run_stages(counted, work, ExecutorSettings())
    assert texts_in(tmp_path / "out") == set()
    run_stages(counted, work, ExecutorSettings())
    assert texts_in(tmp_path / "out") == expected
    runs = {one.name: len((tmp_path / one.name).read_text()) for one in stages}
    assert runs == {one.name: one.tasks + (place == broken) for place, one in enumerate(stages)}
    assert "killed" in (work / "log.txt").read_text()
