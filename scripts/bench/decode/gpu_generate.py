"""Measure decoding with and without drafts: seconds of the prompt and tokens per second, by prompt length.

    .venv/bin/python scripts/bench/decode/gpu_generate.py --load runs/heads --text README.md [--json]

The checkpoint needs draft heads. A prompt is a text, repeated to the wanted length. Both arms generate greedily, and
their tokens are compared. Each length is measured with 1 and with 8 equal prompts that are decoded together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.decode.sampler import Sampler
from bytescale_ext.decode.tree import TreeShape
from megatron.bytescale.cli.shared.inputs import count, size
from scripts.bench.gpu import gpu_parser, parse_on_gpu
from scripts.bench.progress import progress


def measure(decoder: Any, tokens: list[int], length: int, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both arms on ``batch`` prompts, each of ``length`` tokens that repeat ``tokens``."""
    from megatron.bytescale.inference.engine import GenerationRequest

    prompt = (tokens * -(-length // len(tokens)))[:length]
    roomy = replace(decoder, context=length + args.max_tokens)  # positions need no table
    choose = Sampler(0.0, max(tokens) + 1)
    arms: dict[str, TreeShape | None] = {"plain": None, "drafts": TreeShape(args.tree_tokens)}
    figures: dict[str, Any] = {"prompt": length, "batch": batch}
    texts = []
    for name, shape in arms.items():
        request = GenerationRequest(args.max_tokens, choose, shape, batch=batch)
        begun, first, ended = time.perf_counter(), 0.0, {}
        for index, _, done in roomy.stream([prompt] * batch, request):
            first = first or time.perf_counter()  # the prompts have run
            ended.update({} if done is None else {index: done})
        texts.append([ended[index].tokens for index in range(batch)])
        figures[f"{name}_prompt_seconds"] = first - begun
        figures[f"{name}_tokens_per_second"] = batch * (args.max_tokens - 1) / (time.perf_counter() - first)
        figures[f"{name}_forwards"] = ended[0].target_forwards
    return {**figures, "equal": texts[0] == texts[1]}


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, help="folder of checkpoints with draft heads")
    parser.add_argument("--text", type=Path, required=True, help="text that prompts repeat")
    parser.add_argument("--prompts", type=size, nargs="+", default=[4096, 32768, 131072], help="tokens (4K 32K 128K)")
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 8], help="prompts decoded together (1 8)")
    parser.add_argument("--max-tokens", type=count, default=256, help="tokens to generate (256)")
    parser.add_argument("--tree-tokens", type=count, default=20, help="guesses of a tree (20)")
    return parse_on_gpu(parser)


def main() -> None:
    """Measure and print."""
    from megatron.bytescale.cli.generate.texts import Texts
    from megatron.bytescale.inference.load import open_decoder

    args = options()
    decoder, training = open_decoder(args.load, None, on_cpu=args.device == "cpu")
    tokens = Texts(training).tokens(args.text.read_text("utf-8"))
    measure(decoder, tokens, min(args.prompts), 1, args)  # warms up compilation and caches
    parts = [(length, batch) for length in args.prompts for batch in args.batches]
    rows = []
    for length, batch in progress(parts, lambda part: f"{part[1]} x {part[0]:,} tokens"):
        row = measure(decoder, tokens, length, batch, args)
        rows.append(row)
        gain = row["drafts_tokens_per_second"] / row["plain_tokens_per_second"]
        print(
            f"{row['batch']} x {row['prompt']:,} tokens in {row['plain_prompt_seconds']:.2f} s; plain "
            f"{row['plain_tokens_per_second']:.1f} tokens/s, with drafts {row['drafts_tokens_per_second']:.1f}, "
            f"{gain:.2f} times as fast; "
            f"{row['plain_forwards'] / row['drafts_forwards']:.2f} times fewer forward passes; "
            f"{'equal' if row['equal'] else 'DIFFERENT'} tokens",
            flush=True,
        )
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
