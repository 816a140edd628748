"""The models and options that the GPU benchmarks of activations share."""

from __future__ import annotations

import argparse
from typing import Final

import torch

from bytescale_ext.plan.cost.model_shape import ModelShape

SHAPE: Final = ModelShape(8, 4096, 32, 32, 128, 11008, True, 32000)
"""8 layers of the width of a 7B model."""

TINY: Final = ModelShape(4, 64, 2, 2, 32, 128, True, 256)
LOSS_TOKENS: Final = 4096


def make_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every GPU benchmark."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. Ends the program where a GPU is requested but absent."""
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --quick runs tiny sizes")
    return args
