"""Stages of cleaning. Each stage has tasks, which any executor of datatrove runs; finished tasks are skipped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, SentenceFindDedups

from bytescale_ext.data.clean.gates import DocumentFilter
from bytescale_ext.data.clean.near import Decide, Signatures, minhash_config
from bytescale_ext.data.clean.output import Write
from bytescale_ext.data.clean.readers import Collect
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.sentences import SentenceFilter, SentenceSignatures, sentence_config
from bytescale_ext.data.clean.shelf import Shelve, Survivors
from bytescale_ext.data.ray.session import ray_module, sigterm_kept, stay_on_loopback
from bytescale_ext.new_file import appended

EXECUTORS: Final = ("local", "ray", "slurm")
Step = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline of steps that each task runs on its documents."""

    name: str
    tasks: int
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Executor of the stages.

    Attributes:
        executor: one of ``EXECUTORS``.
        workers: number of tasks that run at the same time.
        ray_address: address of a Ray cluster; None starts Ray on this machine.
        slurm: options of sbatch, and partition, time and memory_gb of a task.
    """

    executor: str = "local"
    workers: int = 1
    ray_address: str | None = None
    slurm: tuple[tuple[str, str], ...] = ()


def stages_of(recipe: Recipe, work: Path, last: Step) -> list[Stage]:
    """Return the stages in order; ``last`` runs once, after all parts are written."""
    names, tallies = tuple(source.name for source in recipe.sources), work / "tallies"
    near, sentences = "near" in recipe.steps, "sentences" in recipe.steps
    collect: list[Step] = [Collect(recipe, tallies), DocumentFilter(recipe, tallies), Shelve(names, work)]
    write: list[Step] = [Survivors(names, work), Write(recipe, work)]
    if near:
        collect.append(Signatures(recipe, work / "signatures"))
    stages = [Stage("collect", recipe.tasks, collect)]
    if near:
        folders = str(work / "signatures"), str(work / "matches")
        stages.append(Stage("match", recipe.buckets, [MinhashDedupBuckets(*folders, config=minhash_config(recipe))]))
    stages.append(Stage("decide", 1, [Decide(recipe, work)]))
    if sentences:
        signed, repeated = work / "sentences", work / "repeated"
        sign: list[Step] = [Survivors(names, work), SentenceSignatures(recipe, signed)]
        find: list[Step] = [SentenceFindDedups(str(signed), str(repeated), config=sentence_config(recipe))]
        stages += [Stage("sentences", recipe.tasks, sign), Stage("repeated", 1, find)]
        clean = SentenceFilter(recipe, repeated, tallies)
        write = [Survivors(names, work), clean, Write(recipe, work, clean.close)]
    return [*stages, Stage("write", recipe.tasks, write), Stage("finish", 1, [last])]


def run_stages(stages: list[Stage], work: Path, settings: ExecutorSettings) -> None:
    """Run the stages, or submit them to Slurm, where each stage waits for the stage before it.

    Raises:
        ValueError: a task has failed. The message names its log, unless the input is invalid.
    """
    before: PipelineExecutor | None = None
    with _log(work / "log.txt"), _cluster(settings):
        for stage in stages:
            logs = work / "stages" / stage.name
            executor = _executor(stage, logs, settings, before)
            try:
                executor.run()
            except ValueError:
                raise
            except subprocess.CalledProcessError as error:  # sbatch, whose message is in the log
                raise ValueError(f"stage {stage.name}: {_sbatch_message(work / 'log.txt')}") from error
            except Exception as error:
                raise ValueError(f"stage {stage.name}: {_one_line(error)}; see {logs}/logs") from error
            if settings.executor == "slurm":
                before = executor
            elif executor.get_incomplete_ranks(skip_completed=True):
                raise ValueError(f"stage {stage.name}: tasks have failed; see {logs}/logs")


def _sbatch_message(log: Path) -> str:
    """Return the message of sbatch about the last job, in one line."""
    last = log.read_text(encoding="utf-8").rpartition("Launching Slurm job")[2]
    lines = [line for line in last.split("\n") if line.startswith("sbatch:")]
    return " ".join(lines) or f"sbatch has failed; see {log}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _executor(
    stage: Stage, logs: Path, settings: ExecutorSettings, before: PipelineExecutor | None
) -> PipelineExecutor:
    workers = min(settings.workers, stage.tasks)
    if settings.executor == "local":
        return LocalPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs))
    if settings.executor == "ray":
        return RayPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs), mem_per_cpu_gb=0.25)
    options = dict(settings.slurm)
    return SlurmPipelineExecutor(
        stage.steps,
        stage.tasks,
        time=options.pop("time", "24:00:00"),
        partition=options.pop("partition"),
        qos=options.pop("qos", ""),
        mem_per_cpu_gb=int(options.pop("memory_gb", "4")),
        sbatch_args=options,
        workers=settings.workers,
        job_name=f"clean-{stage.name}",
        env_command=f'export PATH="{Path(sys.executable).parent}:$PATH"',
        depends=before,
        logging_dir=str(logs),
    )


@contextlib.contextmanager
def _cluster(settings: ExecutorSettings) -> Iterator[None]:
    """Join or start Ray if it is the executor, and disconnect at the end."""
    if settings.executor != "ray":
        yield
        return
    if settings.ray_address is None:
        stay_on_loopback()
    ray = ray_module()
    local = {"num_cpus": settings.workers, "include_dashboard": False, "object_store_memory": 256 << 20}
    with sigterm_kept():
        ray.init(settings.ray_address or "local", log_to_driver=False, **({} if settings.ray_address else local))
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _log(path: Path) -> Iterator[None]:
    """Redirect the standard error of datatrove and its processes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    before = os.dup(2)
    with appended(path) as stream:
        os.dup2(stream.fileno(), 2)
        try:
            with contextlib.redirect_stderr(stream):
                yield
        finally:
            os.dup2(before, 2)
            os.close(before)
