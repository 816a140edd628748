"""``bytescale generate``: continue texts with a trained model, several tokens at a time where it has draft heads."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bytescale.cli.shared.inputs import count, size

if TYPE_CHECKING:
    from bytescale_ext.decode.tree import TreeShape

NAME = "generate"
HELP = "continue texts with a checkpoint, with its draft heads if it has any; what is generated does not depend on them"
EXAMPLE = "bytescale generate --load runs/heads --prompt Once --max-tokens 64"
REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bytescale generate``."""
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder of checkpoints with the model")
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="draft heads of this model: bytescale draft export's folder, or checkpoints (--load)",
    )
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    texts.add_argument("--prompts", type=Path, metavar="FILE", help="texts to continue, one in each line")
    parser.add_argument(
        "--batch", type=count, default=8, metavar="N", help="texts that are decoded together (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=size, default=128, metavar="N", help="the most new tokens (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0, the default: the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of sampling (%(default)s)")
    parser.add_argument(
        "--tree-tokens", type=count, default=20, metavar="N", help="the most guesses for each check (%(default)s)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="of the guesses after one token, take the likeliest that make up this probability (%(default)s)",
    )
    parser.add_argument("--chain", action="store_true", help="one guess by each head, not a tree")
    parser.add_argument("--plain", action="store_true", help="token by token, without drafts")
    parser.add_argument("--cpu", action="store_true", help="decode on CPU although there is a GPU")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each text instead of the text")


def run(args: argparse.Namespace) -> int:
    """Generate and print. Of several ranks, which torchrun starts, the first one prints."""
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature:g} must be 0 or more")
    from bytescale_ext.decode.tree import TreeShape  # with torch

    shape = None if args.plain else TreeShape(args.tree_tokens, args.top_p, args.chain)
    prompts = [args.prompt] if args.prompts is None else lines_of(args.prompts)
    logging.disable(logging.WARNING)  # Megatron's, about what this does not use
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        return generate(args, prompts, shape, is_first)
    except ValueError:
        if is_first:
            raise
        return REFUSED  # the first rank says why


def generate(args: argparse.Namespace, prompts: Sequence[str], shape: TreeShape | None, is_first: bool) -> int:
    """Generate after prompts with trees of a shape; print if this is the first rank."""
    from megatron.bytescale.inference.load import open_decoder

    with contextlib.redirect_stdout(io.StringIO()):
        decoder, training = open_decoder(args.load, args.draft, args.cpu)
    import torch

    from bytescale_ext.decode.sampler import Sampler
    from megatron.bytescale.cli.generate.texts import InOrder, Texts
    from megatron.bytescale.inference.engine import Generation, Request, described

    texts = Texts(training)
    choose = Sampler(args.temperature, texts.vocab, torch.Generator().manual_seed(args.seed))
    request = Request(args.max_tokens, choose, shape, texts.end, args.batch)
    shows = sys.stderr.isatty() and (args.json or not sys.stdout.isatty())  # else the text itself is the progress
    out, log = (sys.stdout, sys.stderr) if is_first else (io.StringIO(), io.StringIO())
    ended: list[Generation] = []
    printed = InOrder(len(prompts), texts.stream, lambda text: print(text, end="", flush=True, file=out))
    begun = time.perf_counter()
    for index, new, done in decoder.stream([texts.tokens(prompt) for prompt in prompts], request):
        line = None if done is None else json.dumps(done.figures()) if args.json else ""
        printed.add(index, [] if args.json else new, line)
        ended += [] if done is None else [done]
        if shows:
            print(f"\r{len(ended)} of {len(prompts)} texts", end="", file=log)
    seconds = time.perf_counter() - begun
    what = f"{len(prompts)} {'text' if len(prompts) == 1 else 'texts'}: {described(ended, seconds)}"
    print(f"{chr(13) * shows}{what}", file=log)
    return 0


def lines_of(path: Path) -> Sequence[str]:
    """Return the lines of a file. Raises ValueError for none, an empty one, or other than UTF-8."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines or not all(lines):
        raise ValueError(f"--prompts {path}: give a text in each line")
    return lines
