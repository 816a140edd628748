"""Activation policies where host memory is what is short: a 3B model, 32K to 256K tokens, budgets of 16 to 100 GB.

    .venv/bin/python scripts/bench/gpu_activations_host_bound.py [--cost cost.json] [--json]

Options and figures are those of ``gpu_activations.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.plan.cost import ModelShape  # noqa: E402
from scripts.bench.gpu_activations import parse, run  # noqa: E402

SHAPE = ModelShape(28, 3072, 24, 8, 128, 8192, True, 128256)
LENGTHS = (32768, 65536, 131072, 262144)
HOST_GB = (16.0, 32.0, 64.0, 100.0)


def main() -> None:
    """Measure and print."""
    settings, args = parse(SHAPE, LENGTHS, HOST_GB)
    figures = run(settings, with_sweep=False)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
