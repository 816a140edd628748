"""Run a program on an emulated cluster: every rank has its own share of a core and its own shaped network interface.

    sudo .venv/bin/python scripts/cluster/emulate.py --nodes 2 --ranks-per-node 4 --inter-gbps 0.4 --intra-gbps 4 \\
        --cores-per-rank 0.22 -- pretrain_gpt_hdp.py --hybrid-data-parallel ...

Ranks are processes on this machine. Each has a network namespace behind a token bucket (``topology.py``) and a control
group with a quota of processor time (``quotas.py``). They find each other as under torchrun: MASTER_ADDR is rank 0's
address in the emulated network. The script needs Linux, root, ``ip`` and ``tc``.

Links are given in Gbit/s, or with ``--spec H200-IB --cost-file cost.json``. Then they have the ratio of bytes to
computing of a real cluster (``spec.py``), for a rank with the speed of the cost file. The arithmetic is printed.

Limits: only ratios within one run can be compared. A rank's share of a core covers both its CPU kernels and its TCP
traffic, so sending is never free. Processes that a rank starts, such as the planner, do not use its share; they run
while ranks leave cores free, like the host processors of a GPU. Quotas are off while processes start (imports, building
the model) and are set when rank 0 prints ``--quota-after``. The last line has the shares of computing, sending and
waiting in all steps except the first and the last (``usage.py``).

Everything is removed at exit, also after errors and signals. After SIGKILL the next start with the same ``--name``
removes the leftovers.
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

from bytescale_ext.new_file import appended

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
    """End of a program on the cluster.

    Attributes:
        code: first exit code that is not 0, else 0.
        split: shares of the time in all training steps except the first and the last; None with fewer than three.
    """

    code: int
    split: Split | None


def run_command(command: Sequence[str]) -> None:
    """Run an ``ip`` or ``tc`` command. Raises ValueError with the first line of its error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        hint = " (this kernel has no netem; leave --latency-us out)" if "netem" in command else ""
        raise ValueError(f"{' '.join(command)}: {message}{hint}")


def namespaces(name: str) -> list[str]:
    """Return the network namespaces of all clusters with this name, also of earlier ones."""
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    return [namespace for namespace in names if namespace.startswith(f"{name}-")]


def remove_network(topology: Topology) -> None:
    """Remove the namespaces with this name, and with them their interfaces."""
    for name in namespaces(topology.name):
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def claimed(name: str, folder: Path = _LOCKS) -> Iterator[bool]:
    """Lock a name; yield whether an earlier run with this name left something behind.

    Raises:
        ValueError: a cluster with this name runs.
    """
    path = folder / f"emulated-cluster-{name}.lock"
    was_left = path.exists()
    with appended(path) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--name {name} is in use by a running cluster; give another name") from None
        try:
            yield was_left
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so they clean up too; ignore further signals during the clean-up."""
    signals = (signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, frame: object) -> None:
        for ignored in signals:
            signal.signal(ignored, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def cluster(topology: Topology) -> Iterator[QuotaGroups]:
    """Build the cluster, and remove it at the end. Raises ValueError if this machine cannot run it."""
    check_machine(topology)
    groups = QuotaGroups(topology.name, topology.num_ranks)
    with claimed(topology.name) as was_left, ended_by_signals():
        foreign = [str(groups.top)] * groups.top.exists() + namespaces(topology.name)
        if foreign and not was_left:
            raise ValueError(f"{foreign[0]} exists and does not belong to an emulated cluster; give another --name")
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
    """Raise ValueError if this machine cannot run the cluster."""
    if sys.platform != "linux":
        raise ValueError(f"an emulated cluster needs Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise ValueError("an emulated cluster needs root, for network namespaces and control groups: use sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not found: install iproute2")
    needed, cores = topology.num_ranks * topology.cores_per_rank, os.cpu_count() or 1
    if needed > cores:
        raise ValueError(
            f"{topology.num_ranks} ranks x --cores-per-rank {topology.cores_per_rank:g} need {needed:g} cores, and "
            f"there are {cores}: the largest share that fits is {cores / topology.num_ranks:.2g}"
        )


def run(topology: Topology, launch: Launch) -> Ended:
    """Run the program on every rank. If a rank fails, the other ranks are ended.

    Raises:
        ValueError: this machine cannot run the cluster, or no training began.
        TimeoutError: the time limit is reached.
    """
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    with cluster(topology) as groups:
        for rank in range(topology.num_ranks):
            ranks.append(start_rank(topology, groups, launch, rank))
        ended, is_limited = _watch(topology, groups, launch, ranks)
    for process in ranks:
        process.wait()
    if not is_limited and not ended.code:
        raise ValueError(f"rank 0 never printed {launch.quota_after!r}, so no quotas were set: give --quota-after")
    return ended


def _watch(topology: Topology, groups: QuotaGroups, launch: Launch, ranks: Sequence[Rank]) -> tuple[Ended, bool]:
    """Set the quotas in time, keep helpers out of them, and sample the usage after each step.

    Return the end of the program, when a rank fails or all have ended, and whether quotas were set.
    """
    end, is_limited = time.monotonic() + launch.timeout, False
    samples: list[Sample] = []
    num_steps = 0
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, rank in enumerate(ranks):
            groups.release_helpers(number, rank.pid)
        if not is_limited and launch.quota_after in launch.log(0).read_text(errors="replace"):
            groups.limit(topology.cores(1))
            is_limited = True
        done = launch.log(topology.num_ranks - 1).read_text(errors="replace").count(STEP_TEXT)
        if done > num_steps:
            num_steps = done
            if topology.slow is not None:
                groups.limit(topology.cores(num_steps + 1))
            samples.append(take_sample(topology, groups))
        if any(codes) or all(code == 0 for code in codes):
            steps = samples[:-1]  # threads may have ended before the last sample
            split = Split.of(steps, topology) if len(steps) > 1 else None
            return Ended(next((code for code in codes if code), 0), split), is_limited
        if time.monotonic() > end:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {running} still ran after {launch.timeout:g} s; see {launch.log_dir}")
        time.sleep(_POLL_SECONDS)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="nodes (%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each node (%(default)s)")
    parser.add_argument("--inter-gbps", type=float, default=0.0, help="Gbit/s of a rank to other nodes (no limit)")
    parser.add_argument("--intra-gbps", type=float, default=0.0, help="Gbit/s of a rank inside its node (no limit)")
    parser.add_argument("--spec", choices=SPECS, help="take links that match this cluster; needs --cost-file")
    parser.add_argument("--cost-file", type=Path, metavar="FILE", help="costs by `bytescale profile` on such ranks")
    parser.add_argument("--length-scale", type=float, default=32.0, metavar="N",
                        help="with --spec: real documents are N times as long (%(default)s)")  # fmt: skip
    parser.add_argument("--latency-us", type=float, default=0.0, help="delay of each packet in microseconds (none)")
    parser.add_argument("--cores-per-rank", type=float, default=0.2, help="share of a core (%(default)s)")
    parser.add_argument("--name", default="bytescale", help="prefix of namespaces and control groups (%(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("runs/cluster"), help="folder of the logs (%(default)s)")
    parser.add_argument("--quota-after", metavar="TEXT",
                        help="set the quotas once rank 0 has printed this; '': from the start (for programs of this "
                        f"project: {BEFORE_TRAINING})")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=3600.0, help="time limit in seconds (%(default)s)")
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
            f"{script} is not a program of this project: give with --quota-after the text that rank 0 prints when its "
            "work begins"
        )
    if args.timeout <= 0:
        raise ValueError(f"--timeout {args.timeout:g} must be positive")
    quota_after = BEFORE_TRAINING if args.quota_after is None else args.quota_after
    return topology, Launch(tuple(args.command), args.log_dir, quota_after, args.timeout)


def spec_links(args: argparse.Namespace) -> tuple[float, float]:
    """Return Gbit/s between and inside nodes that match a real cluster, and print the arithmetic. Raises ValueError."""
    from bytescale_ext.measure.cost_file import read_cost

    if args.inter_gbps or args.intra_gbps:
        raise ValueError("--spec sets the links: leave --inter-gbps and --intra-gbps out")
    if args.cost_file is None:
        raise ValueError("--spec needs --cost-file, the speed of a rank, which `bytescale profile` writes")
    links = matched_links(SPECS[args.spec], read_cost(args.cost_file), args.cores_per_rank, args.length_scale)
    print(links.text)
    return links.inter_gbps, links.intra_gbps


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; bad input and an unsuitable machine end with one line and exit code 2."""
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
