"""``bytescale ngram``: rows of an n-gram memory that a data set touches, and hit rates and traffic of a cache."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from bytescale_ext.data.corpus.tokens import CorpusTokens, open_tokens
from bytescale_ext.data.samples.grams import GramRule, numbers
from bytescale_ext.states.cache import POLICIES, CacheSettings
from bytescale_ext.states.traffic import CacheTraffic, measure_traffic, step_rows
from megatron.bytescale.cli.shared.inputs import check_picture, count, size
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot
from megatron.bytescale.cli.shared.tables import aligned

NAME = "ngram"
HELP = "count the rows of an n-gram memory that a data set touches, and the traffic that a cache saves"
EXAMPLE = (
    "bytescale ngram --data data/python --tokens-per-rank 2K --cache-rows 0.1 0.2 --staleness 10 --plot runs/hits.png"
)
MOST_ORDER: Final = 1024  # tokens of an n-gram
MOST_LOOKUPS: Final = 1 << 28  # rows that all tokens read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale ngram``."""
    parser.add_argument("--data", required=True, metavar="PREFIX", help="data set PREFIX.bin and PREFIX.idx")
    parser.add_argument("--orders", type=numbers, default=(2, 3), metavar="N,N", help="lengths of n-grams (2,3)")
    parser.add_argument("--heads", type=count, default=4, metavar="N", help="rows of each n-gram (4)")
    parser.add_argument("--rows", type=size, default=1 << 22, metavar="N", help="rows of the table (4M)")
    parser.add_argument("--dim", type=count, default=64, metavar="N", help="float32 numbers of a row (64)")
    add_option(parser, "--ranks", default=4, note="each has its own cache")
    add_option(parser, "--tokens-per-rank", default=4096)
    parser.add_argument("--tokens", type=size, default=1 << 20, metavar="N", help="the most tokens to read (1M)")
    parser.add_argument(
        "--cache-rows",
        type=float,
        nargs="+",
        default=(0.01, 0.05, 0.1, 0.2, 0.5),
        metavar="S",
        help="sizes of the cache of a rank, as shares of the touched rows (0.01 0.05 0.1 0.2 0.5)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=POLICIES,
        help="rows to evict: lru, the least recently used; lfu, the least frequently used; lfuopt, as lfu, but never a "
        "row that was used ten times (default: all three)",
    )
    parser.add_argument(
        "--staleness",
        type=int,
        default=0,
        metavar="S",
        help="the most updates that a cached row may miss, and that may wait in it (0)",
    )
    add_plot(parser, "the hit rate against the size of the cache")
    add_json(parser)


@dataclass(frozen=True)
class CacheFigures:
    """The traffic of a cache of one policy and size.

    Attributes:
        policy: eviction policy.
        share: size of the cache of a rank, as a share of the touched rows.
        num_lines: size of the cache in rows.
        traffic: traffic of all steps.
    """

    policy: str
    share: float
    num_lines: int
    traffic: CacheTraffic


def run(args: argparse.Namespace) -> int:
    """Count the rows and print the figures.

    Raises:
        ValueError: an option is out of range, the data set is damaged, or it does not fill one step.
    """
    check_options(args)
    rule = GramRule(args.orders, args.heads, args.rows)
    steps = read_steps(args, rule, open_tokens(args.data))
    num_touched = len(np.unique(np.concatenate([rows for batches in steps for rows in batches])))
    rows = []
    for policy in args.policies:
        for share in args.cache_rows:
            num_lines = int(share * num_touched)
            settings = CacheSettings(num_lines, policy, args.staleness, args.staleness)
            traffic = measure_traffic(steps, args.rows, settings, ahead=True)
            rows.append(CacheFigures(policy, share, num_lines, traffic))
    if args.plot is not None:
        from bytescale_ext.draw.charts import draw_hit_rates

        lines = {
            policy: [(row.share, row.traffic.hit_rate) for row in rows if row.policy == policy]
            for policy in args.policies
        }
        draw_hit_rates(lines, args.plot, f"{num_touched:,} rows touched, staleness {args.staleness}")
    print(json_of(rows, num_touched, args.dim) if args.json else text_of(rows, num_touched, args))
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for a size or bound out of range, or a picture that cannot be written."""
    check_picture("--plot", args.plot)
    if args.staleness < 0:
        raise ValueError(f"--staleness {args.staleness} must be at least 0")
    if max(args.orders) > MOST_ORDER:
        raise ValueError(f"--orders {max(args.orders)}: n-grams have at most {MOST_ORDER} tokens")
    of_token = len(args.orders) * args.heads
    if of_token * args.tokens > MOST_LOOKUPS:
        raise ValueError(
            f"--tokens {args.tokens:,} read {of_token:,} rows each (--orders times --heads), and at most "
            f"{MOST_LOOKUPS:,} rows are read: lower one of them"
        )
    for share in args.cache_rows:
        if not 0 <= share <= 1:
            raise ValueError(f"--cache-rows {share:g} is not a share from 0 to 1")


def read_steps(args: argparse.Namespace, rule: GramRule, corpus: CorpusTokens) -> list[list[np.ndarray]]:
    """Return the rows [n] of the micro-batch of each rank in each step. Raises ValueError if no step is full."""
    last = int(np.searchsorted(corpus.offsets, args.tokens, side="left"))
    lengths = corpus.lengths[:last].tolist()
    documents = (corpus.read(number, 0, length) for number, length in enumerate(lengths))
    steps = list(step_rows(rule, documents, args.ranks, args.tokens_per_rank))
    if not steps:
        raise ValueError(
            f"{sum(lengths):,} tokens do not fill a step of {args.ranks} micro-batches of {args.tokens_per_rank:,}: "
            "lower --ranks or --tokens-per-rank, or give more --tokens"
        )
    return steps


def text_of(rows: list[CacheFigures], num_touched: int, args: argparse.Namespace) -> str:
    """Return the figures as text."""
    traffic = rows[0].traffic
    mean = traffic.num_read / traffic.num_steps / args.ranks
    table = [["policy", "cache", "rows", "hit rate", "waited for", "traffic saved", "MB a step", "pushed of read"]]
    table += [
        [
            row.policy,
            f"{row.share:.1%}",
            f"{row.num_lines:,}",
            f"{row.traffic.hit_rate:.1%}",
            f"{row.traffic.wait_rate:.1%}",
            f"{row.traffic.saving:.1%}",
            f"{row.traffic.step_bytes(args.dim) / 1e6:.3f}",
            f"{row.traffic.num_pushed / row.traffic.num_read:.1%}",
        ]
        for row in rows
    ]
    lines = [
        f"{num_touched:,} of {args.rows:,} rows touched in {traffic.num_steps:,} steps of {args.ranks} micro-batches "
        f"of {args.tokens_per_rank:,} tokens; {mean:,.0f} different rows in a micro-batch",
        *aligned(table, {0}),
    ]
    return "\n".join(lines)


def json_of(rows: list[CacheFigures], num_touched: int, dim: int) -> str:
    """Return the figures as JSON."""
    caches = [
        {
            "policy": row.policy,
            "share": row.share,
            "rows": row.num_lines,
            "hit_rate": row.traffic.hit_rate,
            "waited": row.traffic.wait_rate,
            "saved": row.traffic.saving,
            "bytes_a_step": row.traffic.step_bytes(dim),
            **asdict(row.traffic),
        }
        for row in rows
    ]
    return json.dumps({"rows_touched": num_touched, "caches": caches})
