"""``bytescale generate``: continue texts with a trained model, several tokens at a time with draft heads."""

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

from bytescale_ext.errors import one_line
from bytescale_ext.json_input import lines_of_text, stored_text
from bytescale_ext.terminal import stream_of_texts
from megatron.bytescale.checkpoints import sharded_at, trust_checkpoints
from megatron.bytescale.cli.shared.inputs import count, size
from megatron.bytescale.cli.shared.options import add_cpu, add_option, add_trust_checkpoint

if TYPE_CHECKING:
    from bytescale_ext.decode.tree import TreeShape

NAME = "generate"
HELP = "continue texts with a checkpoint; draft heads make this faster and do not change the texts"
EXAMPLE = "bytescale generate --load runs/heads --prompt Once --max-tokens 64"
REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale generate``."""
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder of checkpoints of the model")
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="draft heads of this model: a folder of bytescale draft export, or of checkpoints (default: --load)",
    )
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--prompt", metavar="TEXT", help="text to continue")
    texts.add_argument("--prompts", type=Path, metavar="FILE", help="texts to continue, one on each line")
    parser.add_argument("--batch", type=count, default=8, metavar="N", help="texts decoded together (%(default)s)")
    parser.add_argument("--max-tokens", type=size, default=128, metavar="N", help="the most new tokens (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0, the likeliest)"
    )
    add_option(parser, "--seed", note="for sampling")
    parser.add_argument(
        "--tree-tokens", type=count, default=20, metavar="N", help="the most guesses in each check (%(default)s)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="guess the likeliest tokens with this probability in total, after each token (%(default)s)",
    )
    parser.add_argument("--chain", action="store_true", help="one guess of each head, not a tree")
    parser.add_argument("--plain", action="store_true", help="token by token, without draft heads")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code of the tokenizer that the checkpoint names"
    )
    add_trust_checkpoint(parser)
    add_cpu(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each text instead of the text")


def run(args: argparse.Namespace) -> int:
    """Generate texts and print them. With torchrun, only the first rank prints."""
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature:g} must be 0 or more")
    prompts = [args.prompt] if args.prompts is None else lines_of(args.prompts)
    logging.disable(logging.WARNING)  # Megatron's warnings about unused packages
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        sharded_at("--load", args.load)  # before the slow imports
        from bytescale_ext.decode.tree import TreeShape  # with torch

        shape = None if args.plain else TreeShape(args.tree_tokens, args.top_p, args.chain)
        return generate(args, prompts, shape, is_first)
    except ValueError:
        if is_first:
            raise
        return REFUSED  # the first rank prints the reason


def generate(args: argparse.Namespace, prompts: Sequence[str], shape: TreeShape | None, is_first: bool) -> int:
    """Continue prompts with draft trees of a shape, and print the texts on the first rank."""
    from megatron.bytescale.inference.load import open_decoder

    trust_checkpoints(args.trust_checkpoint)
    with contextlib.redirect_stdout(io.StringIO()):
        decoder, training = open_decoder(args.load, args.draft, args.cpu)
    from bytescale_ext.decode.sampler import Sampler
    from megatron.bytescale.cli.generate.texts import InOrder, Texts
    from megatron.bytescale.inference.engine import Generation, GenerationRequest, described

    texts = Texts(training, args.trust_remote_code)
    choose = Sampler(args.temperature, texts.vocab, args.seed)
    request = GenerationRequest(args.max_tokens, choose, shape, texts.end, args.batch)
    shows = sys.stderr.isatty() and (args.json or not sys.stdout.isatty())  # otherwise the text shows the progress
    out, log = (sys.stdout, sys.stderr) if is_first else (io.StringIO(), io.StringIO())
    if texts.folder:
        print(f"tokenizer: {one_line(texts.folder)}, which the checkpoint names", file=log)
    ended: list[Generation] = []
    printed = InOrder(
        len(prompts), texts.stream, lambda text: print(text, end="", flush=True, file=stream_of_texts(out))
    )
    begun = time.perf_counter()
    for index, new, done in decoder.stream([texts.tokens(prompt) for prompt in prompts], request):
        line = None if done is None else json.dumps(done.figures()) if args.json else ""
        printed.add(index, [] if args.json else new, line)
        ended += [] if done is None else [done]
        if shows:
            print(f"\r{len(ended)} of {len(prompts)} texts", end="", file=log)
    seconds = time.perf_counter() - begun
    figures = described(ended, seconds, has_heads=decoder.heads is not None)
    summary = f"{len(prompts)} {'text' if len(prompts) == 1 else 'texts'}: {figures}"
    print(f"{chr(13) * shows}{summary}", file=log)
    return 0


def lines_of(path: Path) -> Sequence[str]:
    """Return the lines of a file. Raises ValueError for an empty file or line, or for text that is not UTF-8."""
    try:
        lines = lines_of_text(stored_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines or not all(lines):
        raise ValueError(f"--prompts {path}: give a text in each line")
    return lines
