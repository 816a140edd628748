"""Run the GPU benches in half an hour on one GPU, the most valuable first, and keep their results.

    .venv/bin/python scripts/bench/gpu_all.py --dry-run     # the predicted minutes of each command
    .venv/bin/python scripts/bench/gpu_all.py               # run what fits; a second call continues
    .venv/bin/python -m tests.ghost.run scripts/bench/gpu_all.py --quick    # rehearse it without a GPU

Each command has its own process and is ended after ``--budget-per-command`` minutes. A command that would not end
within ``--minutes`` is not started, but shorter commands after it are. The folder ``--output`` has the output and the
JSON of each command, and after each command a new table and ``summary.json``. Finished commands are skipped unless
``--again`` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it also runs as a file

from bytescale_ext.new_file import new_log, write_text
from scripts.bench.progress import progress
from scripts.bench.report import ROOT

DONE, SKIPPED = "done", "done before"
SECONDS_TO_END = 10.0


@dataclass(frozen=True)
class Command:
    """One bench.

    Attributes:
        name: name of its files.
        words: command line; ``{output}`` is the folder of results. The output ends with a line of JSON.
        minutes: predicted minutes.
        headline: function that returns the most important figure of the JSON as text.
        reads: a flag and a file that an earlier command writes; left out if the file is missing, or if empty.
    """

    name: str
    words: tuple[str, ...]
    minutes: float
    headline: Callable[[dict[str, Any]], str]
    reads: tuple[str, ...] = ()

    def words_for(self, output: Path) -> list[str]:
        """Return the command line that writes to a folder."""
        words, reads = ([word.replace("{output}", str(output)) for word in part] for part in (self.words, self.reads))
        return [*words, *(reads if reads and Path(reads[-1]).exists() else ())]


@dataclass(frozen=True)
class Result:
    """Result of a command; ``status`` is "done", "done before" or the reason why there are no figures."""

    name: str
    status: str
    minutes: float
    figures: dict[str, Any] | None = None


@dataclass(frozen=True)
class Limits:
    """Minutes of the whole run and of each command."""

    minutes: float
    per_command: float


def run_all(commands: Sequence[Command], limits: Limits, output: Path, again: bool = False) -> list[Result]:
    """Run the commands that fit, in order, and write the results to ``output`` after each."""
    output.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    results: list[Result] = []
    for command in progress(commands, lambda command: command.name):
        left = limits.minutes - (time.monotonic() - begun) / 60
        before = None if again else finished(command, output)
        if before is not None:
            results.append(before)
        elif min(command.minutes, limits.per_command) > left:
            results.append(Result(command.name, f"not started, {left:.1f} minutes left", 0.0))
        else:
            results.append(run_one(command, min(limits.per_command, left), output))
        write_summary(commands, results, output)
        print(row_text(command, results[-1]), flush=True)
    return results


def finished(command: Command, output: Path) -> Result | None:
    """Return the result of an earlier run of the same command line; None if it did not finish."""
    path = output / f"{command.name}.json"
    if not path.exists():
        return None
    earlier = json.loads(path.read_text())
    if earlier["words"] != list(command.words) or earlier["status"] != DONE:
        return None
    return Result(command.name, SKIPPED, earlier["minutes"], earlier["figures"])


def run_one(command: Command, minutes: float, output: Path) -> Result:
    """Run a command for at most ``minutes``; its output is kept in any case."""
    words = command.words_for(output)
    begun = time.monotonic()
    log = output / f"{command.name}.log"
    with new_log(log) as printed:
        process = subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    lines = log.read_text(errors="replace").strip().splitlines()
    figures = json_of(lines)
    spent = (time.monotonic() - begun) / 60
    if code is None:
        status = f"ended after {spent:.1f} minutes"
    elif code or figures is None:
        status = f"exit code {code}: {last_message(lines)[:120]}"
    else:
        status = DONE
    result = Result(command.name, status, spent, figures if status == DONE else None)
    text = json.dumps({"words": list(command.words), **asdict(result)}, indent=1)
    write_text(output / f"{command.name}.json", text)
    return result


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its children, if they still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(SECONDS_TO_END)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def json_of(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the JSON object of the last line that has one, or None. NCCL may print a warning after it."""
    for line in reversed(lines):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(value := json.loads(line), dict):
                return value
    return None


def last_message(lines: Sequence[str]) -> str:
    """Return the last line that is no warning; NCCL prints warnings when a process ends."""
    messages = [line for line in lines if line.strip() and "Warning:" not in line]
    return messages[-1] if messages else "no message"


def write_summary(commands: Sequence[Command], results: Sequence[Result], output: Path) -> None:
    """Write ``summary.json`` and ``table.txt``."""
    rows = [row_text(command, result) for command, result in zip(commands, results, strict=False)]
    write_text(output / "summary.json", json.dumps([asdict(result) for result in results], indent=1) + "\n")
    write_text(output / "table.txt", "\n".join(rows) + "\n")


def row_text(command: Command, result: Result) -> str:
    """Return one line of the table: the headline, or the reason why there is none."""
    text = result.status
    if result.figures is not None:
        try:
            text = command.headline(result.figures)
        except (KeyError, IndexError, TypeError, ValueError) as error:  # figures of another version of the script
            text = f"{result.status}; its JSON has no headline ({type(error).__name__}: {error})"
    return f"{command.name:22}{command.minutes:6.1f} predicted{result.minutes:6.1f} minutes  {text}"


def plan_text(commands: Sequence[Command], limits: Limits) -> str:
    """Return the predicted minutes of each command, and the commands that start if predictions are right."""
    lines, left = [], limits.minutes
    for command in commands:
        minutes = min(command.minutes, limits.per_command)
        is_started = minutes <= left
        left -= minutes if is_started else 0.0
        note = "" if is_started else "  not started"
        note += "  ended at the limit" if command.minutes > limits.per_command else ""
        lines.append(f"{command.name:22}{command.minutes:6.1f} minutes{note}")
    return "\n".join([*lines, f"{'started':22}{limits.minutes - left:6.1f} of {limits.minutes:g} minutes"])


def main() -> int:
    """Print the plan, or run it; exit code 1 if a command failed."""
    from scripts.bench.gpu_commands import gpu_commands

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="limit of the whole run (%(default)s)")
    parser.add_argument("--budget-per-command", type=float, default=9.0, metavar="M", help="minutes (%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", help="folder of results (runs/gpu)")
    parser.add_argument("--again", action="store_true", help="run finished commands again")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to rehearse the run; it measures nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the predicted minutes of each command")
    parser.add_argument(
        "--activation-gb", type=float, default=70.0, help="memory for activations, in predictions (%(default)s)"
    )
    args = parser.parse_args()
    commands, limits = gpu_commands(args.activation_gb, args.quick), Limits(args.minutes, args.budget_per_command)
    print(plan_text(commands, limits))
    if args.dry_run:
        return 0
    results = run_all(commands, limits, args.output.resolve(), args.again)
    return int(any(result.status.startswith(("exit", "ended")) for result in results))


if __name__ == "__main__":
    sys.exit(main())
