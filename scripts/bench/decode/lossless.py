"""Count the texts that decoding with drafts leaves as plain decoding writes them, on one process or several.

    .venv/bin/python scripts/bench/decode/lossless.py --load runs/heads --prompts prompts.txt --cpu
    torchrun --nproc-per-node 2 scripts/bench/decode/lossless.py --load runs/heads --prompts prompts.txt --cpu

Greedy. The plain texts are decoded one by one, those with drafts together. The exit code is 1 if any text differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.decode.choose import Chooser  # noqa: E402
from bytescale_ext.decode.tree import TreeShape  # noqa: E402
from megatron.bytescale.cli.generate.command import lines_of  # noqa: E402
from megatron.bytescale.cli.shared.inputs import count  # noqa: E402

SHAPES = {
    "plain": None,
    "chain": TreeShape(20, chain=True),
    "5 guesses": TreeShape(5),
    "20 guesses": TreeShape(20),
}


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, help="folder of checkpoints with the model")
    parser.add_argument("--draft", type=Path, help="draft heads, if they are not in those checkpoints")
    parser.add_argument("--prompts", type=Path, required=True, help="texts to continue, one in each line")
    parser.add_argument("--max-tokens", type=count, default=32, help="tokens to generate after each (32)")
    parser.add_argument("--batch", type=count, default=8, help="texts that are decoded together with drafts (8)")
    parser.add_argument("--cpu", action="store_true", help="decode on CPU although there is a GPU")
    return parser.parse_args()


def main() -> int:
    """Compare and print; return the exit code."""
    from megatron.bytescale.cli.generate.texts import Texts
    from megatron.bytescale.inference.engine import Request
    from megatron.bytescale.inference.load import open_decoder

    args = options()
    decoder, training = open_decoder(args.load, args.draft, args.cpu)
    texts = Texts(training)
    prompts = [texts.tokens(line) for line in lines_of(args.prompts)]
    plain: list[list[int]] = []
    rows = []
    for name, shape in SHAPES.items():
        choose = Chooser(0.0, texts.vocab, torch.Generator())
        request = Request(args.max_tokens, choose, shape, texts.end, 1 if shape is None else args.batch)
        done = decoder.generate_all(prompts, request)
        plain = plain or [one.tokens for one in done]
        equal = sum(one.tokens == tokens for one, tokens in zip(done, plain, strict=True))
        rows.append({"shape": name, "equal": equal, "forwards": sum(one.target_forwards for one in done)})
    if os.environ.get("RANK", "0") == "0":
        for row in rows:
            print(f"{row['shape']}: {row['equal']} of {len(prompts)} texts equal, {row['forwards']:,} forward passes")
        digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
        print(json.dumps({"texts": len(prompts), "plain_digest": digest, "rows": rows}))
    return int(any(row["equal"] < len(prompts) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
