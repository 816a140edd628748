"""``bytescale generate``: continue texts with a trained model, several tokens at a time where it has draft heads."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.bytescale.cli.shared.inputs import count, size

NAME = "generate"
HELP = "continue texts with a checkpoint, with its draft heads if it has any; what is generated does not depend on them"
EXAMPLE = "bytescale generate --load runs/heads --prompt Once --max-tokens 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bytescale generate``."""
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder of checkpoints with the model")
    parser.add_argument(
        "--draft", type=Path, metavar="DIR", help="folder of checkpoints with draft heads of this model (--load)"
    )
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    texts.add_argument("--prompts", type=Path, metavar="FILE", help="texts to continue, one in each line")
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
    """Generate and print."""
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature:g} must be 0 or more")
    from bytescale_ext.decode.tree import TreeShape  # with torch

    shape = None if args.plain else TreeShape(args.tree_tokens, args.top_p, args.chain)
    prompts = [args.prompt] if args.prompts is None else lines_of(args.prompts)
    logging.disable(logging.WARNING)  # Megatron's, about what this does not use
    from megatron.bytescale.inference.load import open_decoder

    with contextlib.redirect_stdout(io.StringIO()):
        decoder, training = open_decoder(args.load, args.draft, args.cpu)
    import torch

    from bytescale_ext.decode.choose import Chooser
    from megatron.bytescale.cli.generate.texts import Texts
    from megatron.bytescale.inference.engine import Generation, Request

    texts = Texts(training)
    choose = Chooser(args.temperature, texts.vocab, torch.Generator().manual_seed(args.seed))
    request = Request(args.max_tokens, choose, shape, texts.end)
    out = io.StringIO() if args.json else sys.stdout
    total, seconds = Generation(), 0.0
    for prompt in prompts:
        emit = texts.stream(lambda text: print(text, end="", flush=True, file=out))
        begun = time.perf_counter()
        done = decoder.generate(texts.tokens(prompt), request, emit)
        took = time.perf_counter() - begun
        print(json.dumps({**asdict(done), "tokens_per_second": len(done.tokens) / took}) if args.json else "")
        total, seconds = total + done, seconds + took
    print(f"{len(prompts)} {'text' if len(prompts) == 1 else 'texts'}: {total.line(seconds)}", file=sys.stderr)
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
