"""Two nodes with networks of their own: the launcher's stores and gloo listen in the network of the job only.

The nodes are network namespaces, joined by two networks: the network of the job, and another one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.bytescale import stores

ROOT = Path(__file__).resolve().parents[3]
JOB, OTHER = "10.213.7.", "10.213.8."
SECONDS = 600
# A rank adds its number to the others' and notes all addresses at which its node listens (Linux: state 0A).
RANK = """
import json, os, socket, sys, torch
from torch import distributed

def listening():
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return sorted({words[1].split(":")[0] for words in lines if words[3] == "0A"})

distributed.init_process_group("gloo")
total = torch.tensor([1.0 + distributed.get_rank()])
distributed.all_reduce(total)
found = {"total": total.item(), "master": os.environ["MASTER_ADDR"], "listening": listening()}
distributed.barrier()
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
distributed.destroy_process_group()
"""

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not shutil.which("ip"), reason="no ip; Debian: apt-get install iproute2"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of the network needs root"),
]


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Return the namespaces of two nodes with addresses .1 and .2 in both networks."""
    names = [f"bytescale{os.getpid()}{letter}" for letter in "ab"]
    steps = [f"netns add {name}" for name in names]
    for link in ("job", "other"):
        steps.append(f"link add {link} netns {names[0]} type veth peer name {link} netns {names[1]}")
    for number, name in enumerate(names, 1):
        steps.append(f"-n {name} link set lo up")
        for link, network in (("job", JOB), ("other", OTHER)):
            steps += [f"-n {name} addr add {network}{number}/24 dev {link}", f"-n {name} link set {link} up"]
    try:
        for step in steps:
            made = subprocess.run(["ip", *step.split()], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no namespaces of the network: ip {step}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend=c10d", f"--rdzv-endpoint={JOB}1:29500", "--rdzv-id=x"],
        ["--node-rank={rank}", f"--master-addr={JOB}1", "--master-port=29500"],
    ],
    ids=["c10d", "static"],
)
def test_nodes_listen_in_the_network_of_the_job(words: list[str], nodes: list[str], tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    launch = [sys.executable, "-P", "-m", "megatron.bytescale.launch", "--nnodes=2", "--nproc-per-node=1"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    script = str(tmp_path / "rank.py")
    lines = [[word.format(rank=rank) for word in words] for rank in range(2)]
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *launch, *lines[rank], script, str(tmp_path / f"{rank}.json")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / f"{rank}.log").open("w"),
        )
        for rank, name in enumerate(nodes)
    ]
    try:
        ends = [process.wait(SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert ends == [0, 0], "".join((tmp_path / f"{rank}.log").read_text()[-2000:] for rank in range(2))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["total"] == 3
        assert found["master"] == f"{JOB}1"
        address = socket.inet_aton(f"{JOB}{rank + 1}")[::-1].hex().upper()
        assert found["listening"] == [address]


def test_addresses_of_a_node(nodes: list[str]) -> None:
    """A node lists the addresses of both networks, and asks for one if its name is a loopback address."""
    program = "from megatron.bytescale import stores; print(stores.network_addresses())"
    command = ["ip", "netns", "exec", nodes[1], sys.executable, "-P", "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    assert found.stdout.strip() == str({"job": f"{JOB}2", "other": f"{OTHER}2"}), found.stderr
    assert stores.network_addresses().keys().isdisjoint({"job"})
