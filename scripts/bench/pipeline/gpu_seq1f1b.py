"""Measure the overhead of slices on a GPU: a layer in slices against the whole sequence, in bfloat16.

    .venv/bin/python scripts/bench/pipeline/gpu_seq1f1b.py [--json]

Target: at most 3 % for 4 and 8 slices of 32K and 128K tokens (a layer of the 7B model).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

import torch

from scripts.bench.pipeline.seq1f1b import Sizes, overheads

LENGTHS = (32768, 131072)


def main() -> int:
    """Measure and print; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, last line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_seq1f1b.py: error: torch sees no GPU", file=sys.stderr)
        return 2
    figures = overheads(Sizes(4096, 32, 16384), LENGTHS, "cuda", torch.bfloat16)
    for name, value in figures.items():
        print(f"{name:12} tokens/slices: {value:+.1%}")
    if args.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "split_overhead": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
