"""Measure training with replicas against training without by the clock, on an emulated cluster with a biased router.

    sudo .venv/bin/python scripts/bench/experts/wall_time.py [--rounds 2] [--json]   # about 5 minutes on 2 cores
    sudo .venv/bin/python scripts/bench/experts/wall_time.py --arms static flexmoe eplb
    sudo .venv/bin/python scripts/bench/experts/wall_time.py --arms static flexmoe capacity --capacity-factor 1.0
    .venv/bin/python scripts/bench/experts/wall_time.py --show                        # the command line of each arm

Four ranks on one node share the experts, each with a fixed share of a core and its own network interface
(``scripts/cluster/emulate.py``), so that the others lose the time in which the busiest computes, as GPUs do. All arms
train the same model from the same weights on the same samples. Its router adds a bias to random scores, which differs
by layer and stays for the whole run (Megatron's ``--moe-router-force-biased`` with a negative number); so loads are
uneven, and equal in all arms. Micro-batches are long and few: a replica costs in each what its gradients cost.

Arms take turns, every other round in reverse. The first steps of a run are not counted: there are no replicas before
the first plan. Losses of all arms must be equal, or the script ends with exit code 1. Only the ratio of two arms in one
run can be compared.

The arm capacity is what DeepSpeed does instead (Rajbhandari et al. 2022, "DeepSpeed-MoE"): no replicas, and a rank's
tokens beyond the capacity of an expert, a multiple of its even share, are dropped there (Megatron's own
``--moe-expert-capacity-factor``). It trains another model, so its losses are not compared. What counts is tokens kept
in a second: the tokens of a step, times the share of (token, expert) pairs that were computed. That is read from the
loads that ``--moe-placement-trace`` records after the drop.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.plan.experts.cost import balance_ratio  # noqa: E402
from bytescale_ext.plan.experts.placement import home_parts  # noqa: E402
from bytescale_ext.plan.experts.replay import PLACEMENTS  # noqa: E402
from bytescale_ext.plan.experts.trace import Trace, read_trace  # noqa: E402
from scripts.cluster.emulate import BEFORE_TRAINING, check_machine, run  # noqa: E402
from scripts.cluster.ranks import Launch, preload  # noqa: E402
from scripts.cluster.topology import Topology  # noqa: E402

RANKS, EXPERTS, SLOTS, HIDDEN = 4, 8, 4, 128
SAMPLE, SAMPLES = 512, 4  # tokens of a sample, samples of a rank's micro-batch
TOPK, TOKENS = 2, RANKS * SAMPLES * SAMPLE  # experts of a token, tokens of a step
CAPACITY = "capacity"
ARMS = (*PLACEMENTS, CAPACITY)
SKIPPED = 2
TOLERANCE = 1e-5
TIMEOUT = 600.0
MODEL = (
    f"--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --cpu "
    f"--seq-length {SAMPLE} --max-position-embeddings {SAMPLE} --num-experts {EXPERTS} --moe-router-topk {TOPK} "
    "--moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--transformer-impl local"
).split()
TRAIN = (
    f"--micro-batch-size {SAMPLES} --global-batch-size {RANKS * SAMPLES} --lr 1e-3 --clip-grad 1.0 --log-interval 1 "
    f"--use-distributed-optimizer --expert-model-parallel-size {RANKS} --eval-iters 0 --eval-interval 1000 "
    "--split 100,0,0 --num-workers 0 --no-gradient-accumulation-fusion"
).split()
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([-+\dE.naif]+)")
_BALANCE = re.compile(r"busiest rank have ([\d.]+) times the mean tokens, ([\d.]+) without replicas; (\d+) new")


@dataclass(frozen=True)
class Bench:
    """What all arms have in common.

    Attributes:
        folder: everything is written there.
        steps: of each run.
        bias: standard deviation of what the router adds to the scores of an expert.
        seed: of weights, samples and bias.
        cores: of each rank.
        gbps: of the link of each rank.
        speeds: TFLOPs and GB that a rank computes and sends in a second, for the placement.
        capacity_factor: tokens of a rank that the arm capacity lets an expert compute, over its even share.
    """

    folder: Path
    steps: int
    bias: float
    seed: int
    cores: float
    gbps: float
    speeds: tuple[float, float]
    capacity_factor: float

    @property
    def topology(self) -> Topology:
        """One node."""
        return Topology(1, RANKS, 0.0, self.gbps, 0.0, self.cores)

    @property
    def documents(self) -> Path:
        """The prefix of the samples."""
        return self.folder / f"documents-{self.seed}-{self.steps}"

    @property
    def trace(self) -> Path:
        """The file of the loads of the arm that drops tokens."""
        return self.folder / "capacity-loads.jsonl"

    def words(self, arm: str) -> list[str]:
        """Return the script of an arm, and its flags."""
        flags: list[object] = [ROOT / "pretrain_gpt_hdp.py", *MODEL, *TRAIN, "--train-iters", self.steps]
        flags += ["--moe-router-force-biased", -self.bias, "--seed", 1 + self.seed, "--data-path", self.documents]
        if arm == CAPACITY:
            flags += ["--moe-expert-capacity-factor", self.capacity_factor, "--moe-placement-trace", self.trace]
            return [str(flag) for flag in flags]
        flags += ["--moe-expert-slots", SLOTS, "--moe-placement", arm, "--moe-placement-speeds", *self.speeds]
        return [str(flag) for flag in flags]


@dataclass(frozen=True)
class Steps:
    """What the last rank has logged of each step.

    Attributes:
        ms: of the step.
        losses: mean over its tokens.
        balance: tokens of the busiest expert rank over the mean.
        plain_balance: what that would be without replicas.
        moves: new replicas, placed when the step ends.
        kept: share of (token, expert) pairs that were computed; empty: all.
    """

    ms: tuple[float, ...]
    losses: tuple[float, ...]
    balance: tuple[float, ...]
    plain_balance: tuple[float, ...]
    moves: tuple[int, ...]
    kept: tuple[float, ...] = ()

    @property
    def drops(self) -> bool:
        """Whether tokens were dropped."""
        return any(share < 1 for share in self.kept)

    @classmethod
    def with_drops(cls, log: str, trace: Trace) -> Steps:
        """Read the log of the arm that drops tokens, and the loads after the drop. Raises ValueError as ``of``."""
        steps = _STEP.findall(log)
        if len(steps) != len(trace.loads) or len(steps) <= SKIPPED:
            raise ValueError(f"the log has {len(steps)} steps and the trace {len(trace.loads)}")
        ms, losses = zip(*((float(time), float(loss)) for time, loss in steps), strict=True)
        homes = home_parts(trace.head.experts, trace.head.ranks)
        balance = tuple(mean(balance_ratio(homes, one) for one in step) for step in trace.loads)
        pairs = TOKENS * trace.head.topk * len(trace.layers)
        kept = tuple(float(step.sum()) / pairs for step in trace.loads)
        return cls(ms, losses, balance, balance, (0,) * len(ms), kept)

    @classmethod
    def of(cls, log: str) -> Steps:
        """Read a log. Raises ValueError without a line of each kind for each step, and more than are skipped."""
        steps, balances = _STEP.findall(log), _BALANCE.findall(log)
        if len(steps) != len(balances) or len(steps) <= SKIPPED:
            raise ValueError(f"the log has {len(steps)} steps and {len(balances)} lines about experts")
        ms, losses = zip(*((float(time), float(loss)) for time, loss in steps), strict=True)
        placed, plain, moves = zip(*((float(one), float(two), int(new)) for one, two, new in balances), strict=True)
        return cls(ms, losses, placed, plain, moves)


def write_documents(bench: Bench) -> None:
    """Write random tokens, enough for all steps."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    bench.folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(bench.seed)
    count = RANKS * SAMPLES * (bench.steps + 1)
    write_tokens(bench.documents, (random.integers(0, 256, SAMPLE) for _ in range(count)))


def run_arm(bench: Bench, arm: str, number: int) -> Steps:
    """Train one arm on the cluster. Raises RuntimeError when it fails."""
    folder = bench.folder / f"{arm}-{number + 1}"
    shutil.rmtree(folder, ignore_errors=True)
    bench.trace.unlink(missing_ok=True)
    launch = Launch(tuple(bench.words(arm)), folder, BEFORE_TRAINING, TIMEOUT, is_warm=True)
    code = run(bench.topology, launch).code
    log = launch.log(RANKS - 1).read_text(errors="replace")
    if code:
        raise RuntimeError(f"{arm} ended with exit code {code}, see {folder}:\n{log[-1500:].strip()}")
    return Steps.with_drops(log, read_trace(bench.trace)) if arm == CAPACITY else Steps.of(log)


def run_all(bench: Bench, arms: Sequence[str], rounds: int) -> dict[str, list[Steps]]:
    """Run all arms in turns, every other round in reverse."""
    found: dict[str, list[Steps]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            found[arm].append(run_arm(bench, arm, number))
            print(f"{arm}, round {number + 1}: {median(found[arm][-1].ms[SKIPPED:]):.0f} ms", file=sys.stderr)
    return found


@dataclass(frozen=True)
class Row:
    """The figures of an arm.

    Attributes:
        arm: its name.
        ms: of a step, median over the counted steps of all rounds.
        speedup: over the first arm.
        speedups: the same in each round alone.
        balance: tokens of the busiest expert rank over the mean, mean over counted steps.
        plain_balance: what that would be without replicas.
        moves: new replicas of a run.
        kept: share of (token, expert) pairs that were computed, mean over counted steps.
        kept_per_second: tokens of a step times this share, over its time.
        kept_speedup: the same over the first arm.
    """

    arm: str
    ms: float
    speedup: float
    speedups: tuple[float, ...]
    balance: float
    plain_balance: float
    moves: float
    kept: float
    kept_per_second: float
    kept_speedup: float


def rows_of(found: Mapping[str, Sequence[Steps]]) -> list[Row]:
    """Return a row for each arm; the others are compared with the first.

    Raises:
        RuntimeError: arms that drop no tokens have other losses.
    """
    first, rows = next(iter(found.values())), []
    for arm, runs in found.items():
        compared = [run for run in runs if not (run.drops or first[0].drops)]
        far = max([float(np.abs(np.divide(run.losses, first[0].losses) - 1).max()) for run in compared], default=0.0)
        if not far <= TOLERANCE:
            raise RuntimeError(f"losses of {arm} are up to {far:.1e} from those of the first arm: these are no equals")
        ms, kept = median(_counted([run.ms for run in runs])), _kept(runs)
        rows.append(Row(
            arm,
            ms=ms,
            speedup=median(_counted([run.ms for run in first])) / median(_counted([run.ms for run in runs])),
            speedups=tuple(
                median(plain.ms[SKIPPED:]) / median(run.ms[SKIPPED:]) for plain, run in zip(first, runs, strict=True)
            ),
            balance=mean(_counted([run.balance for run in runs])),
            plain_balance=mean(_counted([run.plain_balance for run in runs])),
            moves=mean([sum(run.moves) for run in runs]),
            kept=kept,
            kept_per_second=1e3 * TOKENS * kept / ms,
            kept_speedup=kept / _kept(first) * median(_counted([run.ms for run in first])) / ms,
        ))  # fmt: skip
    return rows


def _kept(runs: Sequence[Steps]) -> float:
    return mean([share for run in runs for share in run.kept[SKIPPED:] or (1.0,)])


def _counted(columns: Sequence[Sequence[float]]) -> list[float]:
    return [value for column in columns for value in column[SKIPPED:]]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["static", "flexmoe"],
                        help="placements, or dropping of tokens; compared with the first (static flexmoe)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, help="how often every arm runs (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of each run; the first 2 are not counted (%(default)s)")
    parser.add_argument("--bias", type=float, default=2.0, help="standard deviation in the router (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--cores-per-rank", type=float, default=0.4, help="share of a core (%(default)s)")
    parser.add_argument("--gbps", type=float, default=1.0, help="link of a rank, Gbit/s (%(default)s)")
    parser.add_argument("--speeds", type=float, nargs=2, default=[0.01, 0.1], metavar="SPEED",
                        help="--moe-placement-speeds of all arms (0.01 0.1)")  # fmt: skip
    parser.add_argument("--capacity-factor", type=float, default=1.0, metavar="F",
                        help="of the arm capacity: most tokens of an expert over its share (%(default)s)")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "experts", help="of logs (runs/experts)")
    parser.add_argument("--show", action="store_true", help="print the command line of each arm, and run nothing")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, last line")
    return parser


def bench_of(args: argparse.Namespace) -> Bench:
    """Return what is to be run. Raises ValueError for what cannot be run."""
    if args.rounds < 1 or args.steps <= SKIPPED:
        raise ValueError(f"--rounds {args.rounds}, --steps {args.steps}: give 1 and {SKIPPED + 1} or more")
    if not args.bias > 0:
        raise ValueError(f"--bias {args.bias:g} must be positive")
    if not 0 < args.capacity_factor < float("inf"):
        raise ValueError(f"--capacity-factor {args.capacity_factor:g} must be positive")
    if len(set(args.arms)) < len(args.arms):
        raise ValueError(f"--arms {' '.join(args.arms)}: each arm can be given once")
    folder = args.folder.resolve()
    cluster = args.cores_per_rank, args.gbps, tuple(args.speeds)
    return Bench(folder, args.steps, args.bias, args.seed, *cluster, args.capacity_factor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all arms and print a line for each."""
    args = build_parser().parse_args(argv)
    try:
        bench = bench_of(args)
        if args.show:
            for arm in args.arms:
                print(" ".join(bench.words(arm)))
            return 0
        check_machine(bench.topology)
        preload()
        write_documents(bench)
        rows = rows_of(run_all(bench, args.arms, args.rounds))
    except (ValueError, RuntimeError, TimeoutError) as error:
        print(f"wall_time.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    for row in rows:
        rounds = ", ".join(f"{one:.2f}" for one in row.speedups)
        print(
            f"{row.arm}: {row.ms:.0f} ms a step, {row.speedup:.2f} times as fast as {rows[0].arm} (rounds: {rounds}); "
            f"busiest rank {row.balance:.2f} times the mean, {row.plain_balance:.2f} without replicas; "
            f"{row.moves:g} new replicas in {args.steps} steps; {row.kept_per_second:.0f} tokens kept a second "
            f"({100 * row.kept:.1f} %), {row.kept_speedup:.2f} times those of {rows[0].arm}"
        )
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
