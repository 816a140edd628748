"""``bytescale train``: pretrain_gpt_hdp.py from an installed package."""

from __future__ import annotations

import argparse
import sys

NAME = "train"
HELP = "train with all flags of Megatron and of this package, as pretrain_gpt_hdp.py"
EXAMPLE = "torchrun --nproc-per-node 8 -m megatron.bytescale.train --hybrid-data-parallel ... (or: bytescale train ...)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options, because all words after ``train`` are flags of the training, including ``--help``."""


def run(args: argparse.Namespace) -> int:
    """Train with ``args.flags``. Bad input ends the process with one line and exit code 2."""
    from megatron.bytescale.train import main

    sys.argv = ["pretrain_gpt_hdp.py", *args.flags]
    main()
    return 0
