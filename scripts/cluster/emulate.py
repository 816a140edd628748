"""Run a program on an emulated cluster: every rank has its own share of a core and its own shaped network interface.

    sudo .venv/bin/python scripts/cluster/emulate.py --nodes 2 --ranks-per-node 4 --inter-gbps 0.4 --intra-gbps 4 \\
        --cores-per-rank 0.22 -- pretrain_gpt_hdp.py --hybrid-data-parallel ...

Ranks are processes on this machine: each in a network namespace behind a token bucket (``topology.py``), and in a
control group with a quota of processor time (``quotas.py``). They find each other as under torchrun: MASTER_ADDR is
rank 0's address in the emulated network. Needs Linux, root, ``ip`` and ``tc``.

Links are given in Gbit/s, or with ``--spec H200-IB --cost-file cost.json``: then they have the ratio of bytes to
computing of a real cluster (``spec.py``), for a rank as fast as the cost file says. The arithmetic is printed.

Limits: only ratios within one run can be compared. A rank's share of a core covers both its (CPU) kernels and its TCP
traffic, so sending is never free. What a rank starts, as the process that plans, is outside its share and runs while
ranks leave cores free, as on the processors beside a GPU. While the processes start (imports, building the model)
quotas are off; they are set when rank 0 prints ``--quota-after``. At the end one line says where the time of the steps
went, without the first and the last: computing, sending, waiting (``usage.py``).

Everything is removed at exit, also after errors and signals. What a run that was killed with SIGKILL leaves is removed
by the next start of the same ``--name``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from scripts.cluster.quotas import QuotaGroups  # noqa: E402
from scripts.cluster.ranks import Launch, Rank, start_rank  # noqa: E402
from scripts.cluster.spec import SPECS, matched_links  # noqa: E402
from scripts.cluster.topology import Topology, network_commands  # noqa: E402
from scripts.cluster.usage import Sample, Split, take_sample  # noqa: E402

BEFORE_TRAINING = "[before the start of training step]"
STEP_TEXT = "elapsed time per iteration"  # in Megatron's line of each iteration, which the last rank prints
_POLL_SECONDS = 0.2
_LOCKS = Path("/run")


@dataclass(frozen=True)
class Ended:
    """How a program on the cluster ended.

    Attributes:
        code: the first exit code that is not 0, else 0.
        split: where the time went, from the end of the first training step to that of the last but one; None with
            fewer than three steps.
    """

    code: int
    split: Split | None


def run_command(command: Sequence[str]) -> None:
    """Run one ``ip`` or ``tc`` command. Raises ValueError with the first line of its error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        hint = " (this kernel has no netem; leave --latency-us out)" if "netem" in command else ""
        raise ValueError(f"{' '.join(command)}: {said}{hint}")


def namespaces(name: str) -> list[str]:
    """Return the network namespaces of a cluster, those of an earlier and larger one too."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    return [found for line in listed if line.strip() and (found := line.split()[0]).startswith(f"{name}-")]


def remove_network(topology: Topology) -> None:
    """Remove the namespaces of this name; their interfaces go with them."""
    for name in namespaces(topology.name):
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def claimed(name: str, folder: Path = _LOCKS) -> Iterator[bool]:
    """Hold a name alone; yields whether a run of this name has ended without removing what it made.

    Raises:
        ValueError: a cluster of this name runs.
    """
    path = folder / f"emulated-cluster-{name}.lock"
    was_left = path.exists()
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--name {name} is in use by a cluster that runs now; give another") from None
        try:
            yield was_left
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that they too run what cleans up; they wait while that runs."""
    signals = (signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, frame: object) -> None:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {one: signal.signal(one, leave) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def cluster(topology: Topology) -> Iterator[QuotaGroups]:
    """Build the cluster, and tear it down in the end. Raises ValueError if this machine lacks something."""
    check_machine(topology)
    groups = QuotaGroups(topology.name, topology.num_ranks)
    with claimed(topology.name) as was_left, ended_by_signals():
        foreign = [str(groups.top)] * groups.top.exists() + namespaces(topology.name)
        if foreign and not was_left:
            raise ValueError(f"{foreign[0]} exists and is not of an emulated cluster; give another --name")
        try:
            groups.remove()
            remove_network(topology)
            for command in network_commands(topology):
                run_command(command)
            groups.create()
            yield groups
        finally:
            groups.remove()
            remove_network(topology)


def check_machine(topology: Topology) -> None:
    """Raise ValueError with what is missing, before anything is made."""
    if sys.platform != "linux":
        raise ValueError(f"an emulated cluster needs Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise ValueError("an emulated cluster needs root, for network namespaces and control groups: use sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not found: install iproute2")
    wanted, there = topology.num_ranks * topology.cores_per_rank, os.cpu_count() or 1
    if wanted > there:
        raise ValueError(
            f"{topology.num_ranks} ranks x --cores-per-rank {topology.cores_per_rank:g} are {wanted:g} cores, and "
            f"there are {there}: the largest share that fits is {there / topology.num_ranks:.2g}"
        )


def run(topology: Topology, launch: Launch) -> Ended:
    """Run the program on every rank. When one rank fails, the others are ended.

    Raises:
        ValueError: this machine lacks something, or no training began.
        TimeoutError: time is up.
    """
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    with cluster(topology) as groups:
        for rank in range(topology.num_ranks):
            ranks.append(start_rank(topology, groups, launch, rank))
        ended, is_limited = _watch(topology, groups, launch, ranks)
    for one in ranks:
        one.wait()
    if not is_limited and not ended.code:
        raise ValueError(f"rank 0 never printed {launch.quota_after!r}, so no shares were set: give --quota-after")
    return ended


def _watch(topology: Topology, groups: QuotaGroups, launch: Launch, ranks: Sequence[Rank]) -> tuple[Ended, bool]:
    """Set the shares in time, keep helpers out of them, and sample the usage after each step.

    Returns once a rank fails or all have ended; whether shares were set besides.
    """
    end, is_limited = time.monotonic() + launch.timeout, False
    samples: list[Sample] = []
    num_steps = 0
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, rank in enumerate(ranks):
            groups.release_helpers(number, rank.pid)
        if not is_limited and launch.quota_after in launch.log(0).read_text(errors="replace"):
            groups.limit(topology.cores_per_rank)
            is_limited = True
        done = launch.log(topology.num_ranks - 1).read_text(errors="replace").count(STEP_TEXT)
        if done > num_steps:
            num_steps = done
            samples.append(take_sample(topology, groups))
        if any(codes) or all(code == 0 for code in codes):
            steps = samples[:-1]  # threads may have ended before the last one
            split = Split.of(steps, topology) if len(steps) > 1 else None
            return Ended(next((code for code in codes if code), 0), split), is_limited
        if time.monotonic() > end:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {waiting} still ran after {launch.timeout:g} s; see {launch.log_dir}")
        time.sleep(_POLL_SECONDS)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="nodes (%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each (%(default)s)")
    parser.add_argument("--inter-gbps", type=float, default=0.0, help="rank's link to other nodes, Gbit/s (no limit)")
    parser.add_argument("--intra-gbps", type=float, default=0.0, help="rank's link inside its node, Gbit/s (no limit)")
    parser.add_argument("--spec", choices=SPECS, help="links that match those of this cluster; needs --cost-file")
    parser.add_argument("--cost-file", type=Path, metavar="FILE", help="by `bytescale profile` on such ranks")
    parser.add_argument("--length-scale", type=float, default=32.0, metavar="N",
                        help="with --spec: real documents are N times as long (%(default)s)")  # fmt: skip
    parser.add_argument("--latency-us", type=float, default=0.0, help="delay of each packet, microseconds (none)")
    parser.add_argument("--cores-per-rank", type=float, default=0.2, help="share of a core (%(default)s)")
    parser.add_argument("--name", default="bytescale", help="prefix of everything that is made (%(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("runs/cluster"), help="one log a rank (%(default)s)")
    parser.add_argument("--quota-after", metavar="TEXT",
                        help="set the shares once rank 0 has printed this; '': at once (for programs of this project: "
                        f"{BEFORE_TRAINING})")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until ranks are ended (%(default)s)")
    parser.add_argument("command", nargs="+", metavar="-- SCRIPT ...", help="a Python script and its arguments")
    return parser


def parse(argv: Sequence[str]) -> tuple[Topology, Launch]:
    """Return the cluster and what it runs, from the command line. Raises ValueError."""
    args = build_parser().parse_args(argv)
    links = (args.inter_gbps, args.intra_gbps)
    if args.spec is not None:
        links = spec_links(args)
    elif args.cost_file is not None:
        raise ValueError("--cost-file needs --spec")
    topology = Topology(
        args.nodes, args.ranks_per_node, *links, args.latency_us, args.cores_per_rank, args.name
    )  # fmt: skip
    script = Path(args.command[0])
    if not script.is_file():
        raise ValueError(f"{script} is not a file: give a Python script and its arguments after --")
    if args.quota_after is None and not script.resolve().is_relative_to(ROOT):
        raise ValueError(
            f"{script} is not a program of this project: say with --quota-after what rank 0 prints when its work begins"
        )
    if args.timeout <= 0:
        raise ValueError(f"--timeout {args.timeout:g} must be positive")
    quota_after = BEFORE_TRAINING if args.quota_after is None else args.quota_after
    return topology, Launch(tuple(args.command), args.log_dir, quota_after, args.timeout)


def spec_links(args: argparse.Namespace) -> tuple[float, float]:
    """Return the links between and inside nodes that match a real cluster, and print how. Raises ValueError."""
    from bytescale_ext.measure.cost_file import read_cost

    if args.inter_gbps or args.intra_gbps:
        raise ValueError("--spec sets the links: leave --inter-gbps and --intra-gbps out")
    if args.cost_file is None:
        raise ValueError("--spec needs --cost-file, which says how fast a rank computes: `bytescale profile` writes it")
    links = matched_links(SPECS[args.spec], read_cost(args.cost_file), args.cores_per_rank, args.length_scale)
    print(links.text)
    return links.inter_gbps, links.intra_gbps


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line: bad input and an unsuitable machine end with one line and exit code 2."""
    try:
        topology, launch = parse(sys.argv[1:] if argv is None else argv)
        ended = run(topology, launch)
    except (ValueError, OSError) as error:
        print(f"emulate.py: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TimeoutError) else 2
    if ended.code:
        print(f"emulate.py: a rank ended with exit code {ended.code}; see {launch.log_dir}", file=sys.stderr)
    elif ended.split is not None:
        print(ended.split)
    return 1 if ended.code else 0


if __name__ == "__main__":
    sys.exit(main())
