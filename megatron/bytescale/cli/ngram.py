"""``bytescale ngram``: how many rows of an n-gram memory a data set touches, and what a cache of them saves."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bytescale_ext.data.corpus.tokens import CorpusTokens, open_tokens
from bytescale_ext.data.samples.grams import GramRule, numbers
from bytescale_ext.states.cache import POLICIES, CacheSettings
from bytescale_ext.states.traffic import CacheTraffic, measure_traffic, step_rows
from megatron.bytescale.cli.shared.inputs import check_picture, count, size
from megatron.bytescale.cli.shared.tables import aligned

NAME = "ngram"
HELP = "count the rows of an n-gram memory that a data set touches, and what a cache of them saves"
EXAMPLE = "bytescale ngram --data data/python --tokens-per-rank 2K --cache-rows 0.1 0.2 --staleness 10 --plot hits.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale ngram``."""
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a data set PREFIX.bin and PREFIX.idx")
    parser.add_argument("--orders", type=numbers, default=(2, 3), metavar="N,N", help="lengths of n-grams (2,3)")
    parser.add_argument("--heads", type=count, default=4, metavar="N", help="rows of each n-gram (4)")
    parser.add_argument("--rows", type=size, default=1 << 22, metavar="N", help="of the table (4M)")
    parser.add_argument("--dim", type=count, default=64, metavar="N", help="float32 numbers of a row (64)")
    parser.add_argument("--workers", type=count, default=4, metavar="N", help="ranks, each with its own cache (4)")
    parser.add_argument("--tokens-per-rank", type=size, default=4096, metavar="C", help="of a micro-batch (4096)")
    parser.add_argument("--tokens", type=size, default=1 << 20, metavar="N", help="the most tokens to read (1M)")
    parser.add_argument(
        "--cache-rows",
        type=float,
        nargs="+",
        default=(0.01, 0.05, 0.1, 0.2, 0.5),
        metavar="S",
        help="sizes of a worker's cache, as shares of the rows that are touched (0.01 0.05 0.1 0.2 0.5)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=POLICIES,
        help="which row makes room for another: the least recently used, the least often used, or that but for rows "
        "that were used ten times (all)",
    )
    parser.add_argument(
        "--staleness",
        type=int,
        default=0,
        metavar="S",
        help="updates that a cached row may lack, and that may wait in it (0)",
    )
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw the hit rate against the size")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


@dataclass(frozen=True)
class Row:
    """The traffic of one policy and size.

    Attributes:
        policy: which row makes room for another.
        share: size of a worker's cache, of the rows that are touched.
        num_lines: the same in rows.
        traffic: of all steps.
    """

    policy: str
    share: float
    num_lines: int
    traffic: CacheTraffic


def run(args: argparse.Namespace) -> int:
    """Count and print.

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
            rows.append(Row(policy, share, num_lines, measure_traffic(steps, args.rows, settings, ahead=True)))
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
    for share in args.cache_rows:
        if not 0 <= share <= 1:
            raise ValueError(f"--cache-rows {share:g} is not a share from 0 to 1")


def read_steps(args: argparse.Namespace, rule: GramRule, corpus: CorpusTokens) -> list[list[np.ndarray]]:
    """Return for each step the rows [n] of each worker's micro-batch. Raises ValueError where no step is full."""
    last = int(np.searchsorted(corpus.offsets, args.tokens, side="left"))
    lengths = corpus.lengths[:last].tolist()
    documents = (corpus.read(number, 0, length) for number, length in enumerate(lengths))
    steps = list(step_rows(rule, documents, args.workers, args.tokens_per_rank))
    if not steps:
        raise ValueError(
            f"{sum(lengths):,} tokens do not fill a step of {args.workers} micro-batches of {args.tokens_per_rank:,}: "
            "lower --workers or --tokens-per-rank, or give more --tokens"
        )
    return steps


def text_of(rows: list[Row], num_touched: int, args: argparse.Namespace) -> str:
    """Return the figures as text."""
    traffic = rows[0].traffic
    mean = traffic.num_read / traffic.num_steps / args.workers
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
        f"{num_touched:,} of {args.rows:,} rows touched in {traffic.num_steps:,} steps of {args.workers} micro-batches "
        f"of {args.tokens_per_rank:,} tokens; {mean:,.0f} different rows in a micro-batch",
        *aligned(table, {0}),
    ]
    return "\n".join(lines)


def json_of(rows: list[Row], num_touched: int, dim: int) -> str:
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
