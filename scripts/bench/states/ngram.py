#!/usr/bin/env python3
"""Measure what a cache of an n-gram memory's rows saves on real text: bigrams of words, four workers.

    python scripts/bench/states/ngram.py

Tokens are words, signs and spaces of the Python files of this environment, as a tokenizer of words would cut them. Each
worker reads micro-batches of 4,096 tokens and has a cache of its own. The table is the traffic of rows, fetched and
pushed, that caches save. Below it is the least cache that saves 88 %, HET's largest saving (Miao et al. 2021): not in
one pass, where each worker fetches each row that it meets, but in four passes over a quarter of the text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.data.samples.grams import GramRule  # noqa: E402
from bytescale_ext.states.cache import POLICIES, CacheSettings  # noqa: E402
from bytescale_ext.states.traffic import measure_traffic, step_rows  # noqa: E402
from megatron.bytescale.cli.shared.inputs import size  # noqa: E402
from scripts.bench.data.sculpt import python_texts  # noqa: E402

WORKERS, BATCH, ROWS = 4, 4096, 1 << 22
SHARES = (0.05, 0.1, 0.2, 0.5)
BOUNDS = (0, 5, 10, 100)
HET_SAVED = 0.88
PASSES = 4
_WORD = re.compile(rb"\w+|\s+|[^\w\s]")


def documents(texts: Iterator[bytes], num_tokens: int) -> Iterator[np.ndarray]:
    """Yield the word ids [t] of texts, up to a number of tokens; a word's id is its place among all words so far."""
    ids: dict[bytes, int] = {}
    fresh = count()
    total = 0
    for text in texts:
        if total >= num_tokens:
            return
        words = [ids[word] if word in ids else ids.setdefault(word, next(fresh)) for word in _WORD.findall(text)]
        if words:
            total += len(words)
            yield np.array(words)


def least_share(steps: list[list[np.ndarray]], num_touched: int, policy: str, bound: int) -> float | None:
    """Return the least cache, as a share of the rows touched to 1 %, that saves as much as HET's did; None: none does.

    ``steps``: the rows [n] of each worker's batch.
    """

    def saves_enough(percent: int) -> bool:
        settings = CacheSettings(percent * num_touched // 100, policy, bound, bound)
        return measure_traffic(steps, ROWS, settings).saved >= HET_SAVED

    if not saves_enough(100):
        return None
    low, high = 0, 100
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saves_enough(middle) else (middle, high)
    return high / 100


def measure(texts: Iterator[bytes], num_tokens: int) -> dict[str, object]:
    """Return the figures of all caches on the n-grams of two words."""
    steps = list(step_rows(GramRule((2,), 1, ROWS), documents(texts, num_tokens), WORKERS, BATCH))
    touched, uses = np.unique(np.concatenate([rows for step in steps for rows in step]), return_counts=True)
    saved = {
        f"{policy} {share:g} {bound}": measure_traffic(
            steps, ROWS, CacheSettings(int(share * len(touched)), policy, bound, bound)
        ).saved
        for policy in POLICIES
        for share in SHARES
        for bound in BOUNDS
    }
    quarter = steps[: -(-len(steps) // PASSES)]
    again = len(np.unique(np.concatenate([rows for step in quarter for rows in step])))
    least = {bound: least_share(quarter * PASSES, again, POLICIES[0], bound) for bound in BOUNDS[1:]}
    top = np.sort(uses)[::-1]
    return {
        "steps": len(steps),
        "rows_touched": len(touched),
        "reads_of_top_tenth": float(top[: len(top) // 10].sum() / top.sum()),
        "saved": saved,
        "least_share": least,
    }


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=size, default=5_000_000, metavar="N", help="words to read (5,000,000)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = measure(python_texts(), args.tokens)
    print(json.dumps(figures) if args.json else text_of(figures))
    return 0


def text_of(figures: dict[str, object]) -> str:
    """Return the figures as tables."""
    saved = figures["saved"]
    assert isinstance(saved, dict)
    lines = [f"{figures['rows_touched']:,} rows touched in {figures['steps']} steps; the top tenth has "
             f"{figures['reads_of_top_tenth']:.0%} of the reads", "| policy | cache | " +
             " | ".join(f"staleness {bound}" for bound in BOUNDS) + " |", "|---" * (2 + len(BOUNDS)) + "|"]  # fmt: skip
    for policy in POLICIES:
        for share in SHARES:
            cells = [f"{saved[f'{policy} {share:g} {bound}']:.1%}" for bound in BOUNDS]
            lines.append(f"| {policy} | {share:.0%} | {' | '.join(cells)} |")
    least = f"least cache that saves {HET_SAVED:.0%} in {PASSES} passes, by staleness: {figures['least_share']}"
    return "\n".join([*lines, least])


if __name__ == "__main__":
    raise SystemExit(main())
