"""Measure hybrid data parallelism against its alternatives on an emulated cluster: real training, TCP, scaled lengths.

    sudo .venv/bin/python scripts/bench/cluster/speed.py [--sampler byted] [--nodes 1] [--inter-gbps G] [--json]

Every arm trains the same small model on the same documents in the same steps. Lengths are those of a published
distribution, 1:32: a context of 16K tokens with C = 2K represents 512K with 64K. Each rank has a fixed share of a core
and its own network interface (``scripts/cluster/emulate.py``), so the time of a waiting rank is lost, as on a GPU.

- ``ours``: the balance planner.
- ``naive``: ByteScale's Algorithm 1, nothing balanced.
- ``bytescale``: its Algorithm 2 as published.
- ``static``: every document cut over all ranks, as ``--context-parallel-size`` does.

Only the ratio of two arms in one run can be compared. Each round runs every arm, every other round in reverse order;
the first step of an arm is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.draw.timeline import draw_timelines  # noqa: E402
from bytescale_ext.measure.timeline import read_spans  # noqa: E402
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths  # noqa: E402
from scripts.cluster.emulate import Launch, run  # noqa: E402
from scripts.cluster.topology import Topology  # noqa: E402

SCALE = 32
CONTEXT, TOKENS_PER_RANK, SHORTEST = 16384, 2048, 64
DOCUMENTS_PER_RANK = 32  # in each step
TRACED_STEP = 3
MODEL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --cpu"
).split()
TRAIN = (
    "--lr 1e-3 --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000 --split 100,0,0"
).split()
ARMS = {
    "ours": [],
    "naive": ["--hdp-balance", "none"],
    "bytescale": ["--hdp-balance", "bytescale"],
    "static": ["--hdp-static-width", "{num_ranks}"],
}
ARM_NAMES = {"ours": "hybrid data parallelism", "static": "static context parallelism over all ranks"}


@dataclass(frozen=True)
class Case:
    """What is trained on which cluster.

    Attributes:
        topology: the cluster.
        sampler: the distribution of lengths.
        num_steps: of each arm, the first not counted.
        seed: of the lengths and of the order.
    """

    topology: Topology
    sampler: str
    num_steps: int
    seed: int

    @property
    def documents_per_step(self) -> int:
        return DOCUMENTS_PER_RANK * self.topology.num_ranks


def write_documents(case: Case, prefix: Path) -> None:
    """Write random tokens in documents of the case's lengths, enough for all steps, as Megatron's data set."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    wanted = case.documents_per_step * case.num_steps
    lengths = sample_lengths(case.sampler, CONTEXT * SCALE, 200 * CONTEXT * SCALE, case.seed)[:wanted] // SCALE
    assert len(lengths) == wanted, f"{len(lengths)=} {wanted=}"
    random = np.random.default_rng(case.seed)
    write_tokens(prefix, (random.integers(0, 256, length) for length in np.maximum(lengths, SHORTEST).tolist()))


def run_arm(case: Case, arm: str, prefix: Path, folder: Path, timeline: bool) -> list[dict[str, Any]]:
    """Train one arm on the cluster and return the metrics of each step. Raises RuntimeError when it fails."""
    extra = [word.format(num_ranks=case.topology.num_ranks) for word in ARMS[arm]]
    flags = [*MODEL, *TRAIN, "--hybrid-data-parallel", "--hdp-tokens-per-rank", TOKENS_PER_RANK, *extra]
    flags += ["--seq-length", CONTEXT, "--max-position-embeddings", CONTEXT, "--data-path", prefix]
    flags += ["--global-batch-size", case.documents_per_step, "--train-iters", case.num_steps, "--seed", 1 + case.seed]
    flags += ["--hdp-log-dir", folder, "--tensorboard-dir", folder]
    flags += ["--hdp-timeline-step", TRACED_STEP] if timeline else []
    command = (str(ROOT / "pretrain_gpt_hdp.py"), *map(str, flags))
    code = run(case.topology, Launch(command, folder, "[before the start of training step]", 3600.0))
    if code:
        tail = (folder / "rank0.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"arm {arm} ended with exit code {code}:\n{tail}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_rounds(case: Case, args: argparse.Namespace, folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Run every arm once a round, and return the metrics of each step: of each arm, round by round."""
    prefix = folder / "documents"
    write_documents(case, prefix)
    found: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in args.arms}
    for number in range(args.rounds):
        for arm in args.arms if number % 2 == 0 else reversed(args.arms):
            print(f"round {number + 1} of {args.rounds}: {arm} ...", file=sys.stderr, flush=True)
            here = folder / f"round{number + 1}" / arm
            found[arm].append(run_arm(case, arm, prefix, here, args.plot is not None and not number))
    return found


def draw(folder: Path, arms: list[str], found: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Draw the traced step of the first round of some arms under each other."""
    steps = []
    for arm in arms:
        tokens = found[arm][0][TRACED_STEP - 1]["tokens_per_second"]
        title = f"{ARM_NAMES.get(arm, arm)}: {tokens:,.0f} tokens/s in this step, measured"
        steps.append((title, read_spans(folder / "round1" / arm / "timeline")))
    draw_timelines(steps, path)


def compare(rounds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return medians of each arm over its counted steps, and the first arm's speed over the others', step by step."""
    steps = {arm: [step for one in found for step in one] for arm, found in rounds.items()}
    counted = {arm: [step for one in found for step in one[1:]] for arm, found in rounds.items()}
    first, *others = counted
    figures = ("tokens_per_second", "megabytes_sent_per_step", "measured_imbalance")
    speeds = {arm: [step["tokens_per_second"] for step in found] for arm, found in counted.items()}
    ratios = {arm: [a / b for a, b in zip(speeds[first], speeds[arm], strict=True)] for arm in others}
    return {
        "arms": {arm: {n: statistics.median(s[n] for s in found) for n in figures} for arm, found in counted.items()},
        "speedup": {
            arm: {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
            for arm, found in ratios.items()
        },
        "largest_loss_difference": max(
            (
                abs(mine["lm loss"] - theirs["lm loss"]) / theirs["lm loss"]
                for arm in others
                for mine, theirs in zip(steps[first], steps[arm], strict=True)
            ),
            default=0.0,
        ),
    }


def table(case: Case, figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    topology = case.topology
    links = [f"{gbps:g} Gbit/s" if gbps else "unlimited" for gbps in (topology.intra_gbps, topology.inter_gbps)]
    lines = [
        f"{case.sampler} 1:{SCALE}, context {CONTEXT}, C = {TOKENS_PER_RANK}; {topology.num_nodes} nodes x "
        f"{topology.ranks_per_node} ranks of {topology.cores_per_rank:g} core; links inside a node {links[0]}, between "
        f"nodes {links[1]}; {case.num_steps - 1} steps a round of {case.documents_per_step} documents",
        f"{'':10}{'tokens/s':>10}{'MB sent/step':>14}{'imbalance':>11}{'ours is':>22}",
    ]
    for arm, values in figures["arms"].items():
        ratio = figures["speedup"].get(arm)
        told = f"{ratio['median']:.2f}x ({ratio['lowest']:.2f} to {ratio['highest']:.2f})" if ratio else ""
        lines.append(
            f"{arm:10}{values['tokens_per_second']:10,.0f}{values['megabytes_sent_per_step']:14.1f}"
            f"{values['measured_imbalance']:11.2f}{told:>22}"
        )
    return "\n".join([*lines, f"losses of the arms differ by {figures['largest_loss_difference']:.1e} at most"])


def main() -> int:
    """Run the arms one after the other, print the table and, with --json, one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", default="byted", help="distribution of lengths (%(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--inter-gbps", type=float, default=0.0, help="link between nodes (unlimited)")
    parser.add_argument("--intra-gbps", type=float, default=0.0, help="link inside a node (unlimited)")
    parser.add_argument("--cores-per-rank", type=float, default=0.22, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of each arm, the first not counted (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(all)")
    parser.add_argument("--rounds", type=int, default=2, help="how often every arm runs (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw step {TRACED_STEP} of the first and last arm")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, last line")
    args = parser.parse_args()
    try:
        topology = Topology(
            args.nodes, args.ranks_per_node, args.inter_gbps, args.intra_gbps, cores_per_rank=args.cores_per_rank
        )
        case = Case(topology, args.sampler, args.steps, args.seed)
        if args.rounds < 1 or args.steps < TRACED_STEP:
            raise ValueError(f"--rounds {args.rounds}, --steps {args.steps}: give 1 and {TRACED_STEP} or more")
        if args.plot is not None and not args.plot.parent.is_dir():
            raise ValueError(f"--plot {args.plot}: there is no directory {args.plot.parent}")
        with tempfile.TemporaryDirectory() as scratch:
            found = run_rounds(case, args, Path(scratch))
            if args.plot is not None:
                draw(Path(scratch), list(dict.fromkeys((args.arms[0], args.arms[-1]))), found, args.plot)
    except ValueError as error:
        print(f"speed.py: error: {error}", file=sys.stderr)
        return 2
    figures = compare(found)
    print(table(case, figures))
    if args.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
