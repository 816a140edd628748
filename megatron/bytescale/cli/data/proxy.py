"""Small training runs on each source. Their loss curves show which sources still improve the model.

Each run is a real training of a model of half a million parameters on one source alone, with hybrid data parallelism
on one process. Finished runs are not repeated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from bytescale_ext.data.corpus.tokens import open_tokens
from bytescale_ext.data.mix.curves import LEAST_STEPS, Proposal, propose
from bytescale_ext.data.mix.weights import MixturePart
from bytescale_ext.json_input import json_value
from bytescale_ext.new_file import make_own_folder, new_log

if TYPE_CHECKING:
    from bytescale_ext.data.tasks.stages import ExecutorSettings

STEP_TOKENS: Final = 4096
_SECONDS_OF_A_STEP: Final = 60
_START_SECONDS: Final = 600
_MODEL: Final = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --swiglu --normalization "
    "RMSNorm --disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --seq-length 1024 --max-position-embeddings 1024 --split 100,0,0 "
    "--hybrid-data-parallel --hdp-tokens-per-rank 4096 --global-batch-size 4 --lr 3e-3 --lr-decay-style constant "
    "--lr-warmup-iters 4 --clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval "
    "1000000 --no-one-logger"
).split()
_LEAST_VOCABULARY: Final = 257  # bytes and the end of a document


@dataclass(frozen=True)
class ProxyRuns:
    """Small runs of all sources, and the step that trains the runs of a task.

    Attributes:
        parts: data sets.
        steps: steps of a run, of up to ``STEP_TOKENS`` tokens each.
        seeds: runs of each source.
        folder: folder of the runs.
    """

    parts: tuple[MixturePart, ...]
    steps: int
    seeds: int
    folder: Path

    @property
    def sources(self) -> dict[str, list[MixturePart]]:
        """The data sets of each source."""
        names = dict.fromkeys(part.source for part in self.parts)
        return {name: [part for part in self.parts if part.source == name] for name in names}

    def check(self) -> None:
        """Raise ValueError unless there are several sources with tokens for all steps."""
        if self.steps < LEAST_STEPS:
            raise ValueError(f"--proxy-steps {self.steps}: give {LEAST_STEPS} or more")
        if len(self.sources) < 2:
            raise ValueError("--proxy-steps compares sources: give two or more")
        for name, own in self.sources.items():
            most = sum(part.tokens for part in own) // STEP_TOKENS
            if most < self.steps:
                raise ValueError(
                    f"source {name} has tokens for {most} steps without repetition: give fewer --proxy-steps"
                )

    def curves(self) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """Return (tokens [steps], losses [steps]) of the finished runs of each source."""
        found = {
            name: [read_curve(self._folder(name, seed), self.steps) for seed in range(self.seeds)]
            for name in self.sources
        }
        return {name: [curve for curve in curves if curve is not None] for name, curves in found.items()}

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Train runs ``rank``, ``rank + world_size`` and so on, except finished runs.

        Raises:
            ValueError: a run has failed; the message names its log.
        """
        vocabulary = max(_LEAST_VOCABULARY, 1 + max(_largest_id(part.prefix) for part in self.parts))
        runs = [(name, seed) for name in self.sources for seed in range(self.seeds)]
        for name, seed in runs[rank::world_size]:
            _run(self.sources[name], self.steps, seed, self._folder(name, seed), vocabulary)

    def _folder(self, name: str, seed: int) -> Path:
        return self.folder / f"{name}-{self.steps}-{seed}"


def proposals_of(
    runs: ProxyRuns, settings: ExecutorSettings | None = None, tasks: int | None = None
) -> dict[str, Proposal] | None:
    """Train the unfinished runs and return a proposal for each source; None if the runs are jobs of Slurm now.

    Args:
        runs: the runs.
        settings: executor of the runs; None: one run at a time in this process.
        tasks: number of tasks; None: one for each run.

    Raises:
        ValueError: a source has fewer tokens than a run, or a run has failed; the message names its log.
        OSError: the folder of the runs belongs to another user or has links.
    """
    from bytescale_ext.data.tasks.stages import ExecutorSettings, Stage, run_stages

    runs.check()
    if sum(map(len, runs.curves().values())) < runs.seeds * len(runs.sources):
        make_own_folder(runs.folder)
        work = runs.folder / "tasks"
        shutil.rmtree(work, ignore_errors=True)  # finished runs are known by their losses
        stage = Stage("proxy", tasks or runs.seeds * len(runs.sources), [runs])
        run_stages([stage], work, settings or ExecutorSettings())
        if settings is not None and settings.executor == "slurm":
            return None
    return propose(runs.curves())


def command_of(parts: Sequence[MixturePart], steps: int, seed: int, folder: Path, vocabulary: int) -> list[str]:
    """Return the command of one run."""
    import torch

    blend = [str(word) for part in parts for word in (part.samples * part.weight, part.prefix)]
    flags = [*_MODEL, "--data-path", *(blend if len(parts) > 1 else [parts[0].prefix])]
    flags += ["--hdp-global-tokens", str(STEP_TOKENS), "--train-iters", str(steps), "--seed", str(1 + seed)]
    flags += ["--vocab-size", str(vocabulary), "--hdp-log-dir", str(folder)]
    flags += [] if torch.cuda.is_available() else ["--cpu"]
    return [sys.executable, "-P", "-m", "megatron.bytescale.train", *flags]


def read_curve(folder: Path, steps: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the trained tokens and the losses of a finished run, float64 [steps] each; None without one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    rows = [json_value(line) for line in path.read_text().split("\n")[:-1]]
    tokens, losses = (np.array([row[name] for row in rows], float) for name in ("tokens_so_far", "lm loss"))
    return (tokens, losses) if len(losses) == steps else None


def _run(parts: Sequence[MixturePart], steps: int, seed: int, folder: Path, vocabulary: int) -> None:
    """Train a run, unless it is finished."""
    curve = read_curve(folder, steps)
    if curve is None:
        print(f"small run {folder.name}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        _train(command_of(parts, steps, seed, folder, vocabulary), folder / "train.log", steps)
        curve = read_curve(folder, steps)
    if curve is None or not np.all(np.isfinite(curve[1])):
        raise ValueError(f"a small run has failed: see {folder / 'train.log'}")


def _train(command: Sequence[str], log: Path, steps: int) -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    with new_log(log) as output:
        try:
            limit = _START_SECONDS + _SECONDS_OF_A_STEP * steps
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=limit, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"a small run has failed: see {log}") from error


def _largest_id(prefix: str) -> int:
    tokens = open_tokens(prefix).tokens
    block = 1 << 24
    return max(int(tokens[start : start + block].max()) for start in range(0, len(tokens), block))
