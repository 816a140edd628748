"""The stages of cleaning, each of tasks that any of datatrove's executors runs; a finished task is skipped."""

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

from bytescale_ext.data.clean.gates import Gate
from bytescale_ext.data.clean.near import Decide, Signatures, minhash_config
from bytescale_ext.data.clean.output import Write
from bytescale_ext.data.clean.readers import Collect
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.sentences import SentenceFilter, SentenceSignatures, sentence_config
from bytescale_ext.data.clean.shelf import Shelve, Survivors
from bytescale_ext.data.ray.session import ray_module, sigterm_kept, stay_on_loopback

EXECUTORS: Final = ("local", "ray", "slurm")
Step = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that run one after the other on the documents of each task."""

    name: str
    tasks: int
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Where:
    """Where the stages run.

    Attributes:
        executor: of ``EXECUTORS``.
        workers: tasks at a time.
        ray_address: of a cluster; None: Ray is started here.
        slurm: partition, time, memory_gb of a task and more options of sbatch.
    """

    executor: str = "local"
    workers: int = 1
    ray_address: str | None = None
    slurm: tuple[tuple[str, str], ...] = ()


def stages_of(recipe: Recipe, work: Path, last: Step) -> list[Stage]:
    """Return the stages in their order; ``last`` runs once, when all documents are in their parts."""
    names, told = tuple(source.name for source in recipe.sources), work / "told"
    near, sentences = "near" in recipe.steps, "sentences" in recipe.steps
    collect: list[Step] = [Collect(recipe, told), Gate(recipe, told), Shelve(names, work)]
    write: list[Step] = [Survivors(names, work), Write(recipe, work)]
    if near:
        collect.append(Signatures(recipe, work / "signatures"))
    found = [Stage("collect", recipe.tasks, collect)]
    if near:
        folders = str(work / "signatures"), str(work / "matches")
        found.append(Stage("match", recipe.buckets, [MinhashDedupBuckets(*folders, config=minhash_config(recipe))]))
    found.append(Stage("decide", 1, [Decide(recipe, work)]))
    if sentences:
        signed, repeated = work / "sentences", work / "repeated"
        sign: list[Step] = [Survivors(names, work), SentenceSignatures(recipe, signed)]
        find: list[Step] = [SentenceFindDedups(str(signed), str(repeated), config=sentence_config(recipe))]
        found += [Stage("sentences", recipe.tasks, sign), Stage("repeated", 1, find)]
        clean = SentenceFilter(recipe, repeated, told)
        write = [Survivors(names, work), clean, Write(recipe, work, clean.close)]
    return [*found, Stage("write", recipe.tasks, write), Stage("finish", 1, [last])]


def run_stages(stages: list[Stage], work: Path, where: Where) -> None:
    """Run the stages, or submit them to Slurm, where each waits for the one before it.

    Raises:
        ValueError: a task has failed; its log is named unless the input was bad.
    """
    before: PipelineExecutor | None = None
    with _log(work / "log.txt"), _cluster(where):
        for stage in stages:
            logs = work / "stages" / stage.name
            executor = _executor(stage, logs, where, before)
            try:
                executor.run()
            except ValueError:
                raise
            except subprocess.CalledProcessError as error:  # sbatch, which has told the log why
                raise ValueError(f"stage {stage.name}: {_said_by_sbatch(work / 'log.txt')}") from error
            except Exception as error:
                raise ValueError(f"stage {stage.name}: {_last(error)}; see {logs}/logs") from error
            if where.executor == "slurm":
                before = executor
            elif executor.get_incomplete_ranks(skip_completed=True):
                raise ValueError(f"stage {stage.name}: tasks have failed; see {logs}/logs")


def _said_by_sbatch(log: Path) -> str:
    """Return what sbatch has said about the last job, in one line."""
    last = log.read_text(encoding="utf-8").rpartition("Launching Slurm job")[2]
    said = [line for line in last.splitlines() if line.startswith("sbatch:")]
    return " ".join(said) or f"sbatch has failed; see {log}"


def _last(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _executor(stage: Stage, logs: Path, where: Where, before: PipelineExecutor | None) -> PipelineExecutor:
    workers = min(where.workers, stage.tasks)
    if where.executor == "local":
        return LocalPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs))
    if where.executor == "ray":
        return RayPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs), mem_per_cpu_gb=0.25)
    options = dict(where.slurm)
    return SlurmPipelineExecutor(
        stage.steps,
        stage.tasks,
        time=options.pop("time", "24:00:00"),
        partition=options.pop("partition"),
        qos=options.pop("qos", ""),
        mem_per_cpu_gb=int(options.pop("memory_gb", "4")),
        sbatch_args=options,
        workers=where.workers,
        job_name=f"clean-{stage.name}",
        env_command=f'export PATH="{Path(sys.executable).parent}:$PATH"',
        depends=before,
        logging_dir=str(logs),
    )


@contextlib.contextmanager
def _cluster(where: Where) -> Iterator[None]:
    """Join or start Ray where tasks run there, and leave it at the end."""
    if where.executor != "ray":
        yield
        return
    if where.ray_address is None:
        stay_on_loopback()
    ray = ray_module()
    local = {"num_cpus": where.workers, "include_dashboard": False, "object_store_memory": 256 << 20}
    with sigterm_kept():
        ray.init(where.ray_address or "local", log_to_driver=False, **({} if where.ray_address else local))
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _log(path: Path) -> Iterator[None]:
    """Send what datatrove and its processes write to standard error to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("a", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 2)
        try:
            with contextlib.redirect_stderr(stream):
                yield
        finally:
            os.dup2(before, 2)
            os.close(before)
