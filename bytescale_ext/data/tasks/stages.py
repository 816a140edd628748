"""Stages of work. Each stage has tasks, which any executor of datatrove runs; finished tasks are skipped."""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor

from bytescale_ext.data.ray.session import check_address, ray_module, sigterm_kept, stay_on_loopback, without_folders
from bytescale_ext.errors import one_line
from bytescale_ext.new_file import appended

DEFAULT_MEMORY_GB: Final = 4.0
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
        executor: ``local``, ``ray`` or ``slurm``.
        workers: number of tasks that run at the same time.
        ray_address: address of a Ray cluster; None starts Ray on this machine.
        slurm: options of sbatch, and partition, time and memory_gb of a task.
        memory_gb: memory of a task in GB, which Slurm reserves without another memory_gb in ``slurm``.
    """

    executor: str = "local"
    workers: int = 1
    ray_address: str | None = None
    slurm: tuple[tuple[str, str], ...] = ()
    memory_gb: float = DEFAULT_MEMORY_GB


class LocalTasks(LocalPipelineExecutor):  # type: ignore[misc]  # datatrove has no types
    """datatrove's local executor, which also notices a killed process: datatrove waits for its result forever."""

    pipeline: list[Step]

    def run(self) -> None:
        """Run the unfinished tasks, in this process if one task runs at a time.

        Raises:
            BrokenProcessPool: a process was killed.
        """
        ranks = self.get_incomplete_ranks()
        if self.workers == 1:
            pipeline = self.pipeline
            for rank in ranks:
                self.pipeline = copy.deepcopy(pipeline)
                self._run_for_rank(rank, rank)
            return
        with ProcessPoolExecutor(self.workers, multiprocessing.get_context("forkserver")) as pool:
            tasks = [pool.submit(self._run_for_rank, rank, rank) for rank in ranks]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


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
            except BrokenProcessPool as error:
                raise ValueError(
                    f"stage {stage.name}: a process of a task was killed, as without memory: the same command resumes; "
                    f"see {logs}/logs"
                ) from error
            except subprocess.CalledProcessError as error:  # sbatch, whose message is in the log
                raise ValueError(f"stage {stage.name}: {_sbatch_message(work / 'log.txt')}") from error
            except Exception as error:
                message = one_line(f"{type(error).__name__}: {error}")
                raise ValueError(f"stage {stage.name}: {message}; see {logs}/logs") from error
            if settings.executor == "slurm":
                before = executor
            elif executor.get_incomplete_ranks(skip_completed=True):
                raise ValueError(f"stage {stage.name}: tasks have failed; see {logs}/logs")


def _sbatch_message(log: Path) -> str:
    """Return the message of sbatch about the last job, in one line."""
    last = log.read_text(encoding="utf-8").rpartition("Launching Slurm job")[2]
    lines = [line for line in last.split("\n") if line.startswith("sbatch:")]
    return " ".join(lines) or f"sbatch has failed; see {log}"


def _executor(
    stage: Stage, logs: Path, settings: ExecutorSettings, before: PipelineExecutor | None
) -> PipelineExecutor:
    workers = min(settings.workers, stage.tasks)
    if settings.executor == "local":
        return LocalTasks(stage.steps, stage.tasks, workers, logging_dir=str(logs))
    if settings.executor == "ray":
        return RayPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs), mem_per_cpu_gb=0.25)
    options = dict(settings.slurm)
    return SlurmPipelineExecutor(
        stage.steps,
        stage.tasks,
        time=options.pop("time", "24:00:00"),
        partition=options.pop("partition"),
        qos=options.pop("qos", ""),
        mem_per_cpu_gb=int(options.pop("memory_gb", str(math.ceil(settings.memory_gb)))),
        sbatch_args=options,
        workers=settings.workers,
        job_name=f"data-{stage.name}",
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
    else:
        check_address("--ray-address", settings.ray_address)
    ray = ray_module()
    local = {"num_cpus": settings.workers, "include_dashboard": False, "object_store_memory": 256 << 20}
    options = {"log_to_driver": False, "job_config": without_folders(), **({} if settings.ray_address else local)}
    with sigterm_kept():
        try:
            ray.init(settings.ray_address or "local", **options)
        except Exception as error:  # of many types, such as a slow machine's
            raise ValueError(f"--executor ray: Ray does not start ({one_line(error, 200)})") from error
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
