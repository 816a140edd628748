"""Measure the step time of training with and without replicas of experts, on an emulated cluster with a biased router.

    sudo .venv/bin/python scripts/bench/experts/wall_time.py [--rounds 2] [--json]   # about 5 minutes on 2 cores
    sudo .venv/bin/python scripts/bench/experts/wall_time.py --arms static flexmoe capacity --capacity-factor 1.0

Four ranks on one node share the experts. Each rank has a fixed share of a core and its own network interface
(``scripts/cluster/emulate.py``), so the other ranks lose time while the busiest rank computes, as GPUs do. All
arms train the same model from the same weights on the same samples. The router adds a bias to random scores; the bias
differs by layer and stays for the whole run (Megatron's ``--moe-router-force-biased`` with a negative number). So loads
are uneven and the same in all arms. Micro-batches are long and few, because replicas send gradients in each of them.

Arms take turns, and every other round runs in reverse. The first steps of a run do not count, because the first plan
places the first replicas. The script fails with exit code 1 unless the losses of all arms are equal. Only the ratio of
two arms in one run can be compared.

The arm *capacity* does what DeepSpeed does (Rajbhandari et al. 2022, "DeepSpeed-MoE"): without replicas, each rank
drops its tokens beyond the capacity of an expert, a multiple of the even share (Megatron's
``--moe-expert-capacity-factor``). It trains another model, so its losses are not compared. The figure to compare is
tokens kept per second: the tokens of a step, times the computed share of (token, expert) pairs, which
``--moe-placement-trace`` records after the drop.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.plan.experts.cost import balance_ratio
from bytescale_ext.plan.experts.placement import home_parts
from bytescale_ext.plan.experts.replay import PLACEMENTS
from bytescale_ext.plan.experts.trace import Trace, read_trace
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, in_turns
from scripts.cluster.emulate import BEFORE_TRAINING, check_machine, run
from scripts.cluster.ranks import Launch, preload
from scripts.cluster.topology import Topology

RANKS, EXPERTS, SLOTS, HIDDEN = 4, 8, 4, 128
SAMPLE, SAMPLES = 512, 4  # tokens of a sample, samples of a rank's micro-batch
TOPK, TOKENS = 2, RANKS * SAMPLES * SAMPLE  # experts of a token, tokens of a step
GBPS = 1.0  # link of each rank
SEED = 0
CAPACITY = "capacity"
ARMS = (*PLACEMENTS, CAPACITY)
SKIPPED = 2
TOLERANCE = 1e-5
TIMEOUT = 600.0
TRAIN = (
    f"--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --cpu "
    f"--seq-length {SAMPLE} --max-position-embeddings {SAMPLE} --num-experts {EXPERTS} --moe-router-topk {TOPK} "
    "--moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    f"--transformer-impl local --micro-batch-size {SAMPLES} --global-batch-size {RANKS * SAMPLES} --lr 1e-3 "
    f"--clip-grad 1.0 --log-interval 1 --use-distributed-optimizer --expert-model-parallel-size {RANKS} --eval-iters 0 "
    f"--eval-interval 1000 --split 100,0,0 --num-workers 0 --no-gradient-accumulation-fusion --seed {1 + SEED} "
    "--moe-router-force-biased -2.0"  # standard deviation of the bias
).split()
PLACED = f"--moe-expert-slots {SLOTS} --moe-placement-speeds 0.01 0.1".split()
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([-+\dE.naif]+)")
_BALANCE = re.compile(r"busiest rank have ([\d.]+) times the mean tokens, ([\d.]+) without replicas; (\d+) new")


@dataclass(frozen=True)
class Bench:
    """Settings that all arms share.

    Attributes:
        folder: folder of samples and logs.
        steps: steps of each run.
        cores: share of a core of each rank.
        capacity_factor: most tokens of an expert over its even share, in the arm *capacity*.
    """

    folder: Path
    steps: int
    cores: float
    capacity_factor: float

    @property
    def topology(self) -> Topology:
        """One node."""
        return Topology(1, RANKS, 0.0, GBPS, 0.0, self.cores)

    @property
    def documents(self) -> Path:
        """Prefix of the samples."""
        return self.folder / f"documents-{SEED}-{self.steps}"

    @property
    def trace(self) -> Path:
        """File of the loads of the arm that drops tokens."""
        return self.folder / "capacity-loads.jsonl"

    def words(self, arm: str) -> list[str]:
        """Return the script of an arm and its flags."""
        flags: list[object] = [ROOT / "pretrain_gpt_hdp.py", *TRAIN, "--train-iters", self.steps]
        flags += ["--data-path", self.documents]
        if arm == CAPACITY:
            flags += ["--moe-expert-capacity-factor", self.capacity_factor, "--moe-placement-trace", self.trace]
        else:
            flags += [*PLACED, "--moe-placement", arm]
        return [str(flag) for flag in flags]


@dataclass(frozen=True)
class Steps:
    """The figures that the last rank logs for each step.

    Attributes:
        ms: milliseconds of the step.
        losses: mean loss of its tokens.
        balance: tokens of the busiest expert rank over the mean.
        plain_balance: the same ratio without replicas.
        moves: new replicas, placed at the end of the step.
        kept: computed share of (token, expert) pairs; empty if all are computed.
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
        """Read the log of the arm that drops tokens, and the loads after the drop.

        Raises:
            ValueError: log and trace have different numbers of steps, or not more than the skipped steps.
        """
        steps = _STEP.findall(log)
        if len(steps) != len(trace.loads) or len(steps) <= SKIPPED:
            raise ValueError(f"the log has {len(steps)} steps and the trace {len(trace.loads)}")
        ms, losses = zip(*((float(time), float(loss)) for time, loss in steps), strict=True)
        homes = home_parts(trace.head.experts, trace.head.ranks)
        balance = tuple(mean(balance_ratio(homes, loads) for loads in step) for step in trace.loads)
        pairs = TOKENS * trace.head.topk * len(trace.layers)
        kept = tuple(float(step.sum()) / pairs for step in trace.loads)
        return cls(ms, losses, balance, balance, (0,) * len(ms), kept)

    @classmethod
    def of(cls, log: str) -> Steps:
        """Read a log.

        Raises:
            ValueError: a step lacks one of its two lines, or there are not more steps than the skipped ones.
        """
        steps, balances = _STEP.findall(log), _BALANCE.findall(log)
        if len(steps) != len(balances) or len(steps) <= SKIPPED:
            raise ValueError(f"the log has {len(steps)} steps and {len(balances)} lines about experts")
        ms, losses = zip(*((float(time), float(loss)) for time, loss in steps), strict=True)
        placed, plain, moves = zip(*((float(a), float(b), int(new)) for a, b, new in balances), strict=True)
        return cls(ms, losses, placed, plain, moves)


def write_documents(bench: Bench) -> None:
    """Write samples of random tokens, enough for all steps."""
    from megatron.bytescale.core.datasets.corpus import write_tokens

    bench.folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    count = RANKS * SAMPLES * (bench.steps + 1)
    write_tokens(bench.documents, (random.integers(0, 256, SAMPLE) for _ in range(count)))


def run_arm(bench: Bench, arm: str, number: int) -> Steps:
    """Train one arm on the cluster. Raises RuntimeError if the training fails."""
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
    """Run all arms in turns."""
    runs: dict[str, list[Steps]] = {arm: [] for arm in arms}
    for number, arm in progress(in_turns(arms, rounds), lambda turn: f"{turn[1]}, round {turn[0] + 1}"):
        runs[arm].append(run_arm(bench, arm, number))
    return runs


@dataclass(frozen=True)
class Row:
    """The figures of an arm.

    Attributes:
        arm: name of the arm.
        ms: milliseconds of a step, median of the counted steps of all rounds.
        speedup: speed over the first arm.
        speedups: the same in each round.
        balance: tokens of the busiest expert rank over the mean, mean of the counted steps.
        plain_balance: the same ratio without replicas.
        moves: new replicas of a run.
        kept: computed share of (token, expert) pairs, mean of the counted steps.
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


def rows_of(runs: Mapping[str, Sequence[Steps]]) -> list[Row]:
    """Return a row for each arm, compared with the first arm.

    Raises:
        RuntimeError: losses of arms that drop no tokens differ.
    """
    first, rows = next(iter(runs.values())), []
    first_ms = median(_counted([steps.ms for steps in first]))
    for arm, rounds in runs.items():
        compared = [steps for steps in rounds if not (steps.drops or first[0].drops)]
        far = max([float(np.abs(np.divide(steps.losses, first[0].losses) - 1).max()) for steps in compared], default=0)
        if not far <= TOLERANCE:
            raise RuntimeError(f"losses of {arm} are up to {far:.1e} from the losses of the first arm")
        ms, kept = median(_counted([steps.ms for steps in rounds])), _kept(rounds)
        rows.append(Row(
            arm,
            ms=ms,
            speedup=first_ms / ms,
            speedups=tuple(
                median(plain.ms[SKIPPED:]) / median(steps.ms[SKIPPED:])
                for plain, steps in zip(first, rounds, strict=True)
            ),
            balance=mean(_counted([steps.balance for steps in rounds])),
            plain_balance=mean(_counted([steps.plain_balance for steps in rounds])),
            moves=mean([sum(steps.moves) for steps in rounds]),
            kept=kept,
            kept_per_second=1e3 * TOKENS * kept / ms,
            kept_speedup=kept / _kept(first) * first_ms / ms,
        ))  # fmt: skip
    return rows


def _kept(rounds: Sequence[Steps]) -> float:
    return mean([share for steps in rounds for share in steps.kept[SKIPPED:] or (1.0,)])


def _counted(columns: Sequence[Sequence[float]]) -> list[float]:
    return [value for column in columns for value in column[SKIPPED:]]


def row_text(row: Row, first: str) -> str:
    """Return the figures of an arm as one line; ``first`` is the name of the first arm."""
    rounds = ", ".join(f"{speedup:.2f}" for speedup in row.speedups)
    return (
        f"{row.arm}: {row.ms:.0f} ms a step, {row.speedup:.2f} times as fast as {first} (rounds: {rounds}); "
        f"busiest rank {row.balance:.2f} times the mean, {row.plain_balance:.2f} without replicas; "
        f"{row.moves:g} new replicas; {row.kept_per_second:.0f} tokens kept per second "
        f"({100 * row.kept:.1f} %), {row.kept_speedup:.2f} times as many as {first}"
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["static", "flexmoe"],
                        help="arms, compared with the first (static flexmoe)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, help="runs of each arm (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run; the first 2 do not count (12)")
    parser.add_argument("--cores-per-rank", type=float, default=0.4, help="share of a core (%(default)s)")
    parser.add_argument("--capacity-factor", type=float, default=1.0, metavar="F",
                        help="most tokens of an expert over its share, in the arm capacity (%(default)s)")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "experts", help="logs (runs/experts)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def bench_of(args: argparse.Namespace) -> Bench:
    """Return the settings of the command line. Raises ValueError if they cannot run."""
    if args.rounds < 1 or args.steps <= SKIPPED:
        raise ValueError(f"--rounds {args.rounds}, --steps {args.steps}: give 1 and {SKIPPED + 1} or more")
    if not 0 < args.capacity_factor < float("inf"):
        raise ValueError(f"--capacity-factor {args.capacity_factor:g} must be positive and finite")
    if len(set(args.arms)) < len(args.arms):
        raise ValueError(f"--arms {' '.join(args.arms)}: give each arm once")
    return Bench(args.folder.resolve(), args.steps, args.cores_per_rank, args.capacity_factor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all arms and print a line for each."""
    args = build_parser().parse_args(argv)
    try:
        bench = bench_of(args)
        check_machine(bench.topology)
        preload()
        write_documents(bench)
        rows = rows_of(run_all(bench, args.arms, args.rounds))
    except (ValueError, RuntimeError, TimeoutError) as error:
        print(f"wall_time.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    for row in rows:
        print(row_text(row, rows[0].arm))
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
