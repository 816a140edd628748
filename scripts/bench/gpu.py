"""Helpers of the GPU benches: their options, and the seconds of repeated work on a device."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch


def gpu_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every GPU bench."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only to test the script")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on a GPU")
    return parser


def parse_on_gpu(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; end the program if it asks for a GPU and there is none."""
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --quick runs tiny sizes")
    return args


def device_name(device: str) -> str:
    """Return the name of the GPU, or "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def repeated_seconds(run: Callable[[], object], repeats: int, on_cuda: bool, warm_up: int = 1) -> list[float]:
    """Return the seconds of each repeat, after ``warm_up`` runs that do not count."""
    seconds = []
    for _ in range(warm_up + repeats):
        if on_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds[warm_up:]


def median_seconds(run: Callable[[], object], repeats: int, on_cuda: bool, warm_up: int = 1) -> float:
    """Return the median seconds of a run, after ``warm_up`` runs that do not count."""
    return statistics.median(repeated_seconds(run, repeats, on_cuda, warm_up))
