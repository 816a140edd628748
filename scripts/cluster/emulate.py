"""Run a program on an emulated cluster: every rank has its own share of a core and its own shaped network interface.

    sudo .venv/bin/python scripts/cluster/emulate.py --nodes 2 --ranks-per-node 4 --inter-gbps 0.4 --intra-gbps 4 \\
        --cores-per-rank 0.22 -- pretrain_gpt_hdp.py --hybrid-data-parallel ...

Ranks are processes on this machine: each in a network namespace behind a token bucket (``topology.py``), and in a
control group with a quota of processor time. They find each other as under torchrun: MASTER_ADDR is rank 0's address
in the emulated network. Needs Linux, root, ``ip`` and ``tc``.

Only ratios within one run can be compared. A rank's share of a core covers both its (CPU) kernels and its TCP traffic.
While the processes start (imports, building the model) quotas are off; they are set when rank 0 prints
``--quota-after``.

Everything is removed at exit, also after errors. What a killed run leaves is removed by the next start of the same
``--name``.
"""

from __future__ import annotations

import argparse
import contextlib
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

from scripts.cluster.topology import Topology, network_commands  # noqa: E402

PERIOD_US = 10_000
_MASTER_PORT = "29500"
_POLL_SECONDS = 0.2


class QuotaGroups:
    """One control group for each rank, under one for the cluster: version 1 (``cpu``) or version 2.

    Raises:
        ValueError: neither version is mounted with its cpu controller.
    """

    def __init__(self, name: str, num_ranks: int, root: Path = Path("/sys/fs/cgroup")) -> None:
        if (root / "cpu" / "cgroup.procs").exists():
            self.is_v1, base = True, root / "cpu"
        elif (root / "cgroup.controllers").exists() and "cpu" in (root / "cgroup.controllers").read_text().split():
            self.is_v1, base = False, root
            (base / "cgroup.subtree_control").write_text("+cpu")
        else:
            raise ValueError(f"no control groups with a cpu controller under {root}: shares of cores need them")
        self.top = base / name
        self.folders = [self.top / str(rank) for rank in range(num_ranks)]

    def create(self) -> None:
        """Make the groups, without quotas."""
        self.top.mkdir()
        if not self.is_v1:
            (self.top / "cgroup.subtree_control").write_text("+cpu")
        for folder in self.folders:
            folder.mkdir()

    def limit(self, cores: float) -> None:
        """Give every rank this much processor time per second."""
        quota = max(1000, round(cores * PERIOD_US))
        for folder in self.folders:
            if self.is_v1:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def remove(self) -> None:
        """Kill what still runs in the groups, and remove the groups, also those of an earlier run with this name."""
        if not self.top.exists():
            return
        folders = [path for path in self.top.iterdir() if path.is_dir()]
        for folder in (*folders, self.top):
            _end_group(folder)
            folder.rmdir()


def _end_group(folder: Path) -> None:
    for _ in range(100):
        pids = (folder / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def run_command(command: Sequence[str]) -> None:
    """Run one ``ip`` or ``tc`` command. Raises ValueError with the first line of its error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        hint = " (this kernel has no netem; leave --latency-us out)" if "netem" in command else ""
        raise ValueError(f"{' '.join(command)}: {said}{hint}")


def remove_network(topology: Topology) -> None:
    """Remove the namespaces of this name, those of an earlier and larger cluster too; their interfaces go with them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    for name in (line.split()[0] for line in listed if line.strip()):
        if name.startswith(f"{topology.name}-"):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def cluster(topology: Topology) -> Iterator[QuotaGroups]:
    """Build the cluster, and tear it down in the end. Raises ValueError if this machine lacks something."""
    check_machine(topology)
    groups = QuotaGroups(topology.name, topology.num_ranks)
    groups.remove()
    remove_network(topology)
    try:
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


@dataclass(frozen=True)
class Launch:
    """What every rank runs.

    Attributes:
        command: a Python script and its arguments.
        log_dir: rank r prints to ``rank{r}.log`` there.
        quota_after: quotas are set when rank 0 has printed this; empty: at once.
        timeout: seconds until the ranks are ended.
    """

    command: tuple[str, ...]
    log_dir: Path
    quota_after: str
    timeout: float


def start_rank(topology: Topology, groups: QuotaGroups, launch: Launch, rank: int) -> subprocess.Popen[bytes]:
    """Start one rank in its namespace and control group."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": topology.address(0),
        "MASTER_PORT": _MASTER_PORT,
        "RANK": str(rank),
        "WORLD_SIZE": str(topology.num_ranks),
        "LOCAL_RANK": str(rank % topology.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(topology.ranks_per_node),
        "GROUP_RANK": str(rank // topology.ranks_per_node),
    }

    def enter() -> None:
        (groups.folders[rank] / "cgroup.procs").write_text("0")
        with open(f"/var/run/netns/{topology.namespace(rank)}") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)

    with (launch.log_dir / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *launch.command], env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=enter
        )


def run(topology: Topology, launch: Launch) -> int:
    """Run the program on every rank; return the first exit code that is not 0, else 0.

    When one rank fails, the others are ended. Raises TimeoutError when time is up.
    """
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    with cluster(topology) as groups:
        ranks = [start_rank(topology, groups, launch, rank) for rank in range(topology.num_ranks)]
        end, is_limited = time.monotonic() + launch.timeout, False
        while True:
            codes = [process.poll() for process in ranks]
            if not is_limited and launch.quota_after in (launch.log_dir / "rank0.log").read_text(errors="replace"):
                groups.limit(topology.cores_per_rank)
                is_limited = True
            if any(codes) or all(code == 0 for code in codes):
                return next((code for code in codes if code), 0)
            if time.monotonic() > end:
                waiting = [rank for rank, code in enumerate(codes) if code is None]
                raise TimeoutError(f"ranks {waiting} still ran after {launch.timeout:g} s; see {launch.log_dir}")
            time.sleep(_POLL_SECONDS)


def parse(argv: Sequence[str]) -> tuple[Topology, Launch]:
    """Return the cluster and what it runs, from the command line. Raises ValueError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="nodes (%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each (%(default)s)")
    parser.add_argument("--inter-gbps", type=float, default=0.0, help="rank's link to other nodes, Gbit/s (no limit)")
    parser.add_argument("--intra-gbps", type=float, default=0.0, help="rank's link inside its node, Gbit/s (no limit)")
    parser.add_argument("--latency-us", type=float, default=0.0, help="delay of each packet, microseconds (none)")
    parser.add_argument("--cores-per-rank", type=float, default=0.2, help="share of a core (%(default)s)")
    parser.add_argument("--name", default="bytescale", help="prefix of everything that is made (%(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("runs/cluster"), help="one log a rank (%(default)s)")
    parser.add_argument("--quota-after", default="[before the start of training step]", metavar="TEXT",
                        help="set the shares once rank 0 has printed this (%(default)s); '': at once")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until ranks are ended (%(default)s)")
    parser.add_argument("command", nargs="+", metavar="-- SCRIPT ...", help="a Python script and its arguments")
    args = parser.parse_args(argv)
    topology = Topology(
        args.nodes, args.ranks_per_node, args.inter_gbps, args.intra_gbps, args.latency_us, args.cores_per_rank,
        args.name,
    )  # fmt: skip
    if not Path(args.command[0]).is_file():
        raise ValueError(f"{args.command[0]} is not a file: give a Python script and its arguments after --")
    return topology, Launch(tuple(args.command), args.log_dir, args.quota_after, args.timeout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line: bad input and an unsuitable machine end with one line and exit code 2."""
    try:
        topology, launch = parse(sys.argv[1:] if argv is None else argv)
        code = run(topology, launch)
    except (ValueError, OSError) as error:
        print(f"emulate.py: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TimeoutError) else 2
    if code:
        print(f"emulate.py: a rank ended with exit code {code}; see {launch.log_dir}", file=sys.stderr)
    return 1 if code else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and shares are taken down
    sys.exit(main())
