"""Run the tests that need a GPU: kernels, streams, model states, and a training with each feature.

    .venv/bin/python scripts/bench/gpu_tests.py [--quick] [--json]

The exit code is 0 even if tests fail, so that the figures are kept. The log has the failures. ``--quick`` leaves out
the trainings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it also runs as a file

from scripts.bench.gpu import gpu_parser, parse_on_gpu
from scripts.bench.report import ROOT

OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def figures_of(printed: str) -> dict[str, object]:
    """Return the numbers of tests by outcome, and the names of the failed tests.

    Raises RuntimeError if pytest ended without a summary.
    """
    lines = [line for line in printed.splitlines() if OUTCOME.search(line)]
    if not lines:
        raise RuntimeError("pytest printed no summary: its output is above")
    outcomes = {name.replace("errors", "error"): int(number) for number, name in OUTCOME.findall(lines[-1])}
    numbers = {name: outcomes.get(name, 0) for name in ("passed", "failed", "error", "skipped")}
    return {**numbers, "failures": FAILED.findall(printed)}


def main() -> None:
    """Run pytest, print its output and, with ``--json``, one JSON object as the last line."""
    args = parse_on_gpu(gpu_parser(str(__doc__).splitlines()[0]))
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=", "-rfEs", "--tb=short"]
    words += ["--ignore=tests/e2e"] if args.quick else []
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # printed at once, so that the log shows how far it came
        print(line, end="", flush=True)
        lines.append(line)
    process.wait()
    figures = figures_of("".join(lines))
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
