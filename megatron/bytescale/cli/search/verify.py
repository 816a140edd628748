"""``bytescale search --verify N``: train the best strategies on this machine, and compare them with their predictions.

The script that the search writes starts each training, on documents of random tokens with the lengths of the task's
steps. Two warm-up steps run first: caches fill, and planning moves to its own process. After the timed steps, one more
step measures memory.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.samples.epochs import EpochOrder
from bytescale_ext.json_input import json_value, lines_of_text
from bytescale_ext.measure.fit import rank_correlation
from bytescale_ext.new_file import new_log, write_text
from bytescale_ext.plan.search.costed import CostedStrategy
from bytescale_ext.plan.search.explore import ScoredStrategy
from bytescale_ext.plan.search.task import Task
from megatron.bytescale.cli.search.script import ScriptedRun, script_text, write_costs
from megatron.bytescale.cli.shared.model_flags import given_flags, words_of
from megatron.bytescale.cli.shared.tables import aligned

SEED: Final = 1234
TRAIN: Final = 0
"""Split whose order decides the documents of each step."""

MOST_IDS: Final = 1 << 16
"""The most ids of random tokens, which are stored with 16 bits."""

MOST_SECONDS: Final = 1800.0
"""Limit of a training."""

STEPS_BEFORE: Final = 2
"""Warm-up steps."""

SECONDS_TO_END: Final = 60.0
RANKS_OF_A_CORE: Final = 4
"""The most ranks that share a core of a machine without GPUs."""

_FAILURES: Final = (r"^pretrain_gpt_hdp.py: error: (.+)$", r"^(?:\[rank\d+\]: ?)?([\w.]+Error: .+)$")


@dataclass(frozen=True)
class Verified:
    """A strategy that was trained.

    Attributes:
        number: place in the search, from 1.
        strategy: short name of the strategy.
        predicted_seconds, seconds: median seconds of a step; None if the training failed.
        predicted_gb, gb: device memory of the fullest rank, in the step with most tokens.
        failure: reason of a failure; empty without one.
    """

    number: int
    strategy: str
    predicted_seconds: float
    predicted_gb: float
    seconds: float | None = None
    gb: float | None = None
    failure: str = ""


type Train = Callable[[ScriptedRun, Sequence[str], Path, Verified], Verified]
"""Trains a run with further flags, writes its logs to a folder, and returns its row with the measurements."""


def check_machine(args: argparse.Namespace) -> None:
    """Raise ValueError if this machine cannot run ``--ranks`` processes."""
    import torch

    if args.explain is not None:
        raise ValueError("--verify and --explain exclude each other: remove one of them")
    if args.ranks > args.ranks_per_node:
        raise ValueError(
            f"--verify trains on this machine, and --ranks {args.ranks} need several nodes of --ranks-per-node "
            f"{args.ranks_per_node}: search for one node"
        )
    there, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if not on_cpu(args) and args.ranks > there:
        raise ValueError(
            f"--verify trains on this machine, which has {there} GPUs: search for --ranks {there}, or add --cpu to "
            "--model-flags"
        )
    if on_cpu(args) and args.ranks > RANKS_OF_A_CORE * cores:
        raise ValueError(
            f"--verify trains on this machine: --ranks {args.ranks} are too many processes for its {cores} cores; "
            f"search for up to {RANKS_OF_A_CORE * cores}"
        )


def on_cpu(args: argparse.Namespace) -> bool:
    """Return whether trainings run on CPU: ``--cpu`` is among the flags of the model, or there is no GPU."""
    import torch

    return "--cpu" in words_of(args.model_flags) or not torch.cuda.is_available()


def verified(
    args: argparse.Namespace, task: Task, scored: Sequence[ScoredStrategy], train: Train | None = None
) -> list[Verified]:
    """Train strategies one after another and return a row for each; Ctrl-C keeps the finished rows.

    Args:
        args: options of ``bytescale search``.
        task: task of the search.
        scored: strategies to train.
        train: function that trains a strategy; None: run the script of the search on this machine.
    """
    fullest = max(range(len(task.steps)), key=lambda step: sum(task.steps[step]))
    steps = [task.steps[0]] * STEPS_BEFORE + [*task.steps, task.steps[fullest]]
    rows = []
    with tempfile.TemporaryDirectory(prefix="bytescale-search-") as name:
        folder = Path(name)
        write_documents(folder / "documents", steps, min(MOST_IDS, task.cost.shape.vocab))
        for number, result in enumerate(scored, 1):
            print(f"training {number} of {len(scored)}: {result.strategy}", file=sys.stderr)
            of_number = folder / str(number)
            of_number.mkdir()
            write_costs(of_number / "cost.json", task, result.strategy)
            run = ScriptedRun.of(args.model_flags, task, result.strategy, "cost.json")
            words = flags_of_trial(args, task, folder / "documents", of_number)
            gb = CostedStrategy.of(task, result.strategy).step_bytes(task.steps[fullest]) / 1e9
            row = Verified(number, str(result.strategy), result.median_seconds, gb)
            try:
                rows.append((train or partial(by_script, args))(run, words, of_number, row))
            except KeyboardInterrupt:
                if not rows:
                    raise
                print("stopped; finished trainings:", file=sys.stderr)
                break
    return rows


def write_documents(prefix: Path, steps: Sequence[Sequence[int]], num_ids: int) -> None:
    """Write documents of random tokens that a training with ``SEED`` groups into these steps."""
    from megatron.bytescale.core.datasets.corpus import write_tokens  # Megatron takes seconds to import

    lengths = np.array([length for step in steps for length in step])
    of_rows = np.empty_like(lengths)
    of_rows[EpochOrder(len(lengths), SEED, TRAIN).rows(np.arange(len(lengths)))] = lengths
    random = np.random.default_rng(SEED)
    write_tokens(prefix, (random.integers(0, num_ids, length) for length in of_rows))


def flags_of_trial(args: argparse.Namespace, task: Task, documents: Path, folder: Path) -> list[str]:
    """Return the flags of data and duration: the arguments of the script."""
    given = given_flags(words_of(args.model_flags))
    num_steps = STEPS_BEFORE + len(task.steps) + 1
    words: list[object] = ["--data-path", documents, "--split", "100,0,0", "--seed", SEED, "--lr", 1e-5]
    words += ["--train-iters", num_steps, "--eval-iters", 0, "--eval-interval", num_steps, "--log-interval", 1]
    words += ["--hdp-log-dir", folder, "--hdp-memory-step", num_steps]
    if "--tokenizer-type" not in given:
        words += ["--tokenizer-type", "NullTokenizer"]
        words += [] if "--vocab-size" in given else ["--vocab-size", task.cost.shape.vocab]
    words += ["--cpu"] if on_cpu(args) else []
    return [str(word) for word in words]


def by_script(
    args: argparse.Namespace, run: ScriptedRun, words: Sequence[str], folder: Path, row: Verified
) -> Verified:
    """Run the script of a training with ``words`` as its arguments; see ``measured``."""
    script = folder / "launch.sh"
    write_text(script, script_text(run, args.ranks, args.ranks_per_node, "torchrun", []))
    return measured(["bash", str(script), *words], folder, row)


def measured(command: Sequence[str], folder: Path, row: Verified) -> Verified:
    """Run a training and return its row with the measurements of ``folder``/metrics.jsonl, or with its failure."""
    log = folder / "log.txt"
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHON": sys.executable}
    with new_log(log) as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder)
        try:
            code = process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return replace(row, failure=f"it takes longer than {MOST_SECONDS:g} s")
        finally:
            end(process)
    if code:
        return replace(row, failure=reason(log.read_text(encoding="utf-8", errors="replace"), code))
    return with_metrics(row, folder)


def with_metrics(row: Verified, folder: Path) -> Verified:
    """Return a row with the measurements of ``folder``/metrics.jsonl."""
    steps = [json_value(line) for line in lines_of_text((folder / "metrics.jsonl").read_text(encoding="utf-8"))]
    timed = [step["step_seconds"] for step in steps[STEPS_BEFORE:-1]]
    return replace(row, seconds=statistics.median(timed), gb=steps[-1]["device_peak_megabytes"] / 1e3)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs; it ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reason(text: str, code: int) -> str:
    """Return the reason of a failure from the output of a training: its refusal, or the first error of a rank."""
    matches = (re.search(pattern, text, re.MULTILINE) for pattern in _FAILURES)
    return next((match.group(1)[:200] for match in matches if match is not None), f"exit code {code}")


def correlation(rows: Sequence[Verified]) -> float | None:
    """Return the rank correlation of predicted and measured times; None for fewer than two successful trainings."""
    pairs = [(row.predicted_seconds, row.seconds) for row in rows if row.seconds is not None]
    return rank_correlation(pairs) if len(pairs) > 1 else None


def verified_text(rows: Sequence[Verified]) -> str:
    """Return a table of the strategies by measured time, and the quality of the predictions."""
    heads = ("", "strategy", "predicted s", "measured s", "ratio", "predicted GB", "measured GB", "ratio")
    ran = [(row.seconds, row.gb, row) for row in rows if row.seconds is not None and row.gb is not None]
    ran.sort(key=lambda entry: entry[0])
    cells = [
        (str(row.number), row.strategy, f"{row.predicted_seconds:.4g}", f"{seconds:.4g}",
         f"{seconds / row.predicted_seconds:.2f}", f"{row.predicted_gb:.4g}", f"{gb:.4g}",
         f"{gb / row.predicted_gb:.3f}")
        for seconds, gb, row in ran
    ]  # fmt: skip
    lines = aligned([heads, *cells], left={1})
    lines += [f"{row.number}  {row.strategy}: failed: {row.failure}" for row in rows if row.failure]
    agreement = correlation(rows)
    if agreement is not None:
        lines.append(f"\nrank correlation of predicted and measured times: {agreement:.2f}")
    first = next((seconds for seconds, _, row in ran if row.number == 1), None)
    if first is not None:
        lines.append(f"the first strategy of the search takes {first / ran[0][0]:.3f} times as long as the fastest")
    return "\n".join(lines)
