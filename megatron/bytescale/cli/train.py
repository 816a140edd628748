"""``bytescale train``: what pretrain_gpt_hdp.py does, from an installed package."""

from __future__ import annotations

import argparse
import sys

NAME = "train"
HELP = "train, as pretrain_gpt_hdp.py does: all of Megatron's flags and ours"
EXAMPLE = "torchrun --nproc-per-node 8 -m megatron.bytescale.train --hybrid-data-parallel ... (or: bytescale train ...)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: all words after ``train`` are flags of the training, ``--help`` too."""


def run(args: argparse.Namespace) -> int:
    """Train with ``args.flags``. Bad input ends the process with one line and exit code 2."""
    from megatron.bytescale.train import main

    sys.argv = ["pretrain_gpt_hdp.py", *args.flags]
    main()
    return 0
