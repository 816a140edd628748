"""Measure the overhead of slices on one GPU: a layer in slices against the whole sequence, in bfloat16.

    .venv/bin/python scripts/bench/pipeline/gpu_seq1f1b.py [--json]

Target: at most 3 % for 4 and 8 slices of 32K and 128K tokens (a layer of the 7B model). ``--device cpu`` tests the
script on tiny sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

import torch

from scripts.bench.gpu import device_name, gpu_parser, parse_on_gpu
from scripts.bench.pipeline.seq1f1b import Sizes, overheads

LENGTHS = (32768, 131072)


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    args = parse_on_gpu(gpu_parser(str(__doc__).splitlines()[0]), words)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    is_tiny = args.quick or args.device == "cpu"
    sizes, lengths = (Sizes(16, 2, 32), (256,)) if is_tiny else (Sizes(4096, 32, 16384), LENGTHS)
    figures = overheads(sizes, lengths, args.device, dtype)
    for name, value in figures.items():
        print(f"{name:12} tokens/slices: {value:+.1%}")
    if args.json:
        print(json.dumps({"device": device_name(args.device), "split_overhead": figures}))


if __name__ == "__main__":
    main(sys.argv[1:])
