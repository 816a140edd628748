"""Measure hierarchical rings against plain ones on an emulated cluster of two nodes: exchange alone, and training.

    sudo .venv/bin/python scripts/bench/cluster/rings.py [--json]      # 2 nodes x 4 ranks, under 5 minutes

The exchange is that of one sequence on a ring of all ranks, forward and backward, without computing (``exchange.py``).
The training is real, on documents that need all ranks, with ``--hdp-hierarchical-rings off`` and ``always`` in turns;
the links are so slow that attention does not hide the exchange of plain rings. Losses must be equal. Only the ratio of
two arms in one run can be compared.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from scripts.bench.cluster.exchange import BEGIN  # noqa: E402
from scripts.bench.cluster.speed import MODEL, TRAIN  # noqa: E402
from scripts.cluster.emulate import BEFORE_TRAINING, check_machine, run  # noqa: E402
from scripts.cluster.ranks import Launch, preload  # noqa: E402
from scripts.cluster.topology import Topology  # noqa: E402

FORMS = {"plain": "off", "hierarchical": "always"}
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Bench:
    """What is measured.

    Attributes:
        folder: logs and documents are written there.
        topology: the emulated cluster.
        tokens: of each document; each rank of a ring holds its share.
        num_steps: of each training run; the first is not counted.
        repeats: passes of each form in the measurement of the exchange.
    """

    folder: Path
    topology: Topology
    tokens: int
    num_steps: int
    repeats: int


def launched(bench: Bench, command: list[object], name: str, quota_after: str) -> Launch:
    """Run a program on the cluster and return where it logged. Raises RuntimeError when it fails."""
    launch = Launch(tuple(map(str, command)), bench.folder / name, quota_after, 600.0, is_warm=True)
    if run(bench.topology, launch).code:
        raise RuntimeError(f"{name} failed:\n{launch.log(0).read_text(errors='replace')[-2000:]}")
    return launch


def exchange_seconds(bench: Bench) -> dict[str, list[float]]:
    """Return the seconds of a forward and of a backward pass of each form."""
    program = [ROOT / "scripts" / "bench" / "cluster" / "exchange.py"]
    words = ["--tokens", bench.tokens, "--repeats", bench.repeats]
    launch = launched(bench, [*program, *words], "exchange", BEGIN)
    found: dict[str, list[float]] = json.loads(launch.log(0).read_text().splitlines()[-1])
    return found


def train(bench: Bench, form: str, number: int) -> tuple[list[float], list[float]]:
    """Return seconds and loss of each step of a training run, the first left out."""
    ranks = bench.topology.num_ranks
    flags = [*MODEL, *TRAIN, "--hybrid-data-parallel", "--hdp-hierarchical-rings", FORMS[form]]
    flags += ["--hdp-tokens-per-rank", bench.tokens // ranks, "--seq-length", bench.tokens]
    flags += ["--max-position-embeddings", bench.tokens, "--data-path", documents(bench)]
    flags += ["--global-batch-size", ranks, "--train-iters", bench.num_steps]
    launch = launched(bench, [ROOT / "pretrain_gpt_hdp.py", *flags], f"{form}-{number + 1}", BEFORE_TRAINING)
    return read_steps(launch.log(ranks - 1).read_text(errors="replace"))


def read_steps(text: str) -> tuple[list[float], list[float]]:
    """Return seconds and loss of each logged step but the first."""
    milliseconds = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)
    losses = re.findall(r"lm loss: ([-\d.E+naif]+)", text)
    return [float(one) / 1e3 for one in milliseconds[1:]], [float(one) for one in losses[1:]]


def documents(bench: Bench) -> Path:
    """Return the prefix of random documents, written at the first call."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    prefix = bench.folder / f"documents-{bench.tokens}"
    if not prefix.with_suffix(".idx").exists():
        random, number = np.random.default_rng(0), bench.num_steps * bench.topology.num_ranks
        write_tokens(prefix, (random.integers(0, 256, bench.tokens) for _ in range(number)))
    return prefix


def measure(bench: Bench, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians and ratios. Raises RuntimeError when a run fails or losses differ."""
    preload()
    passes = exchange_seconds(bench)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    losses: list[list[float]] = []
    for number in range(num_rounds):
        for form in FORMS if number % 2 == 0 else reversed(FORMS):
            times, found = train(bench, form, number)
            seconds[form] += times
            losses.append(found)
    if not np.allclose(losses, losses[0], rtol=LOSS_TOLERANCE):
        raise RuntimeError(f"the losses of plain and hierarchical rings differ: {losses}")
    return {
        "exchange": with_ratio({form: sum(each) for form, each in passes.items()}),
        "forward": with_ratio({form: each[0] for form, each in passes.items()}),
        "backward": with_ratio({form: each[1] for form, each in passes.items()}),
        "step": with_ratio({form: statistics.median(each) for form, each in seconds.items()}),
    }


def with_ratio(seconds: dict[str, float]) -> dict[str, float]:
    """Return the seconds and how many times faster hierarchical rings are."""
    return {**seconds, "ratio": seconds["plain"] / seconds["hierarchical"]}


def report(found: dict[str, dict[str, float]]) -> str:
    """Return a table of what was measured."""
    lines = [f"{'seconds':<28}{'plain':>10}{'hierarchical':>14}{'times faster':>14}"]
    names = {"forward": "exchange, forward", "backward": "exchange, backward", "exchange": "exchange, both",
             "step": "training step"}  # fmt: skip
    for name, title in names.items():
        one = found[name]
        lines.append(f"{title:<28}{one['plain']:>10.3f}{one['hierarchical']:>14.3f}{one['ratio']:>14.2f}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, default=4, help="of two nodes (%(default)s)")
    parser.add_argument("--inter-gbps", type=float, default=0.05, help="rank's link to the other node (%(default)s)")
    parser.add_argument("--intra-gbps", type=float, default=0.5, help="rank's link inside its node (%(default)s)")
    parser.add_argument("--cores-per-rank", type=float, default=0.22, help="share of a core (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of each document (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of a training run, the first not counted (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="training runs of each form (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="passes of each form without computing (%(default)s)")
    parser.add_argument("--log-dir", type=Path, default=ROOT / "runs" / "rings", help="logs (runs/rings)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, last line")
    return parser


def main() -> int:
    """Measure and print."""
    args = build_parser().parse_args()
    try:
        if min(args.steps - 1, args.rounds, args.repeats, args.ranks_per_node - 1) < 1:
            raise ValueError("give 2 steps, 1 round, 1 repeat and 2 ranks of a node, or more")
        topology = Topology(
            2, args.ranks_per_node, args.inter_gbps, args.intra_gbps, 0.0, args.cores_per_rank, name="rings"
        )
        if args.tokens % topology.num_ranks:
            raise ValueError(f"--tokens {args.tokens} is not a multiple of the {topology.num_ranks} ranks")
        check_machine(topology)
        found = measure(Bench(args.log_dir.resolve(), topology, args.tokens, args.steps, args.repeats), args.rounds)
    except (ValueError, RuntimeError, TimeoutError) as error:
        print(f"rings.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(report(found))
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
