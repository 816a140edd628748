"""Stores of a rendezvous listen at one address: others refuse the connection."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore, run
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from megatron.bytescale import launch, stores
from megatron.bytescale.launch import listen_on_own_network
from megatron.bytescale.training import initialize

OTHER = "127.0.0.2"  # Linux answers at all addresses of 127.0.0.0/8


@pytest.fixture(autouse=True)
def _own_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what the tests replace."""
    for module in (c10d_rendezvous_backend, static_tcp_rendezvous):
        monkeypatch.setattr(module, "TCPStore", TCPStore)
    monkeypatch.setattr(dynamic_rendezvous, "DynamicRendezvousHandler", dynamic_rendezvous.DynamicRendezvousHandler)
    monkeypatch.setattr(
        c10d_rendezvous_backend, "_matches_machine_hostname", c10d_rendezvous_backend._matches_machine_hostname
    )
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", *INTERFACES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(initialize, "_hosted", [])


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


def rendezvous(endpoint: str) -> TCPStore:
    """Return the store of torchrun's c10d rendezvous."""
    return c10d_rendezvous_backend._create_tcp_store(RendezvousParameters("c10d", endpoint, "id", 1, 1))


def second_store(address: str) -> TCPStore:
    """Return the store that the first node hosts for the ranks."""
    return dynamic_rendezvous.DynamicRendezvousHandler._create_tcp_store_server(None, address, 0)


def test_a_hosted_store_listens_at_its_address() -> None:
    store = stores.hosted_store(stores.LOOPBACK, 0, timeout=timedelta(seconds=60))
    TCPStore(stores.LOOPBACK, store.port, timeout=timedelta(seconds=60)).set("key", "value")
    assert store.get("key") == b"value"
    assert answers(stores.LOOPBACK, store.port)
    assert not answers(OTHER, store.port)
    assert answers(OTHER, TCPStore(stores.LOOPBACK, 0, is_master=True).port)  # torch's own store
    with pytest.raises(RuntimeError, match=r"cannot listen at 127\.0\.0\.1, port \d+: Address already in use"):
        stores.hosted_store(stores.LOOPBACK, store.port)


def test_the_stores_of_one_node_listen_on_the_loopback_interface() -> None:
    stores.bind_rendezvous(True)
    first = rendezvous("localhost:0")
    static = static_tcp_rendezvous.create_rdzv_handler(
        RendezvousParameters("static", "127.0.0.1:0", "id", 1, 1, rank=0, timeout=60)
    )
    static.next_rendezvous()
    for store in (first, second_store("127.0.0.1"), static._store):
        assert answers(stores.LOOPBACK, store.port)
        assert not answers(OTHER, store.port)
    rendezvous(f"localhost:{first.port}").set("key", "value")  # the port is in use, so it is a client
    assert first.get("key") == b"value"


def test_several_nodes_on_one_machine_listen_on_the_loopback_interface() -> None:
    stores.bind_rendezvous(False)
    store = rendezvous("localhost:0")
    assert answers(stores.LOOPBACK, store.port)
    assert not answers(OTHER, store.port)


def test_several_nodes_listen_at_the_address_of_their_network() -> None:
    stores.bind_rendezvous(False)
    address = stores.own_address("192.0.2.1")  # an address for documentation
    if address is not None:  # a machine with a network
        store = second_store(address)
        assert answers(address, store.port)
        assert not answers(stores.LOOPBACK, store.port)
        assert stores.is_own(address)


@pytest.mark.parametrize(
    ("host", "is_one_node", "networks", "address"),
    [
        ("node7", True, ["10.0.0.7"], "127.0.1.1"),
        ("node7", False, ["10.0.0.7"], "10.0.0.7"),
        ("127.0.0.1", False, ["10.0.0.7"], "127.0.0.1"),
        ("localhost", False, ["10.0.0.7"], "127.0.0.1"),
        ("node7", False, ["10.0.0.7", "172.17.0.1"], "10.0.0.7, 172.17.0.1: give --rdzv-endpoint"),
        ("node7", False, [], "no addresses: give --rdzv-endpoint"),
    ],
)
def test_a_name_that_other_nodes_do_not_reach(
    host: str, is_one_node: bool, networks: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's ``/etc/hosts`` maps the name of the machine to 127.0.1.1."""
    monkeypatch.setattr(stores, "own_address", lambda name: "127.0.1.1" if name == "node7" else "127.0.0.1")
    monkeypatch.setattr(stores, "network_addresses", lambda: {f"eth{n}": found for n, found in enumerate(networks)})
    if "give" not in address:
        assert stores.hosting_address(host, is_one_node) == address
        return
    with pytest.raises(ValueError, match=address):
        stores.hosting_address(host, is_one_node)


def test_a_launcher_without_an_address_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "own_address", lambda name: "127.0.1.1")
    monkeypatch.setattr(stores, "network_addresses", dict)
    monkeypatch.setattr(launch, "note_state_at_signal", lambda progress: None)
    monkeypatch.setattr(launch, "follow_ranks", lambda progress: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launch.main(["--nnodes", "2", "--rdzv-endpoint", "node7:29500", "script.py"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    text = capsys.readouterr().err
    assert text.startswith("bytescale launch: error: node7 is 127.0.1.1 on this machine")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "address", "replaced"),
    [
        (["--standalone"], None, {"local_addr": "127.0.0.1"}),
        ([], None, {"local_addr": "127.0.0.1"}),
        (["--rdzv-endpoint", "localhost:29500"], "127.0.0.1", {"local_addr": "127.0.0.1"}),
        (["--rdzv-endpoint", "node7:29500"], "10.0.0.7", {"local_addr": "10.0.0.7"}),
        (["--nnodes", "2", "--rdzv-endpoint", "node7:29500"], "10.0.0.8", {"local_addr": "10.0.0.8"}),
        (["--nnodes", "2", "--rdzv-endpoint", "[fd00::7]:29500"], "fd00::8", {"local_addr": "fd00::8"}),
        (["--nnodes", "1:4", "--rdzv-endpoint", "localhost:29500"], "127.0.0.1", {"local_addr": "127.0.0.1"}),
        (["--nnodes", "2", "--master-addr", "node7"], "10.0.0.8", {"local_addr": "10.0.0.8"}),
        (["--nnodes", "2", "--master-addr", "own"], "10.0.0.8", {"local_addr": "10.0.0.8", "master_addr": "10.0.0.8"}),
        (["--nnodes", "2", "--rdzv-endpoint", "node7:29500"], None, {}),
        (["--nnodes", "2", "--rdzv-endpoint", "node7:29500", "--local-addr", "x"], "10.0.0.8", {"local_addr": "x"}),
    ],
)
def test_addresses_of_launch_lines(
    words: list[str], address: str | None, replaced: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(stores, "own_address", lambda host: asked.append(host) or address)
    monkeypatch.setattr(stores, "is_own", lambda host: host == "own")
    monkeypatch.setattr(stores, "network_addresses", lambda: {"eth7": "10.0.0.7", "eth8": "10.0.0.8"})
    arguments = run.parse_args([*words, "script.py"])
    assert listen_on_own_network(arguments) == replaced
    assert not asked or asked[0] in ("127.0.0.1", "localhost", "node7", "own", "fd00::7")
    interface = {"127.0.0.1": "lo", "10.0.0.7": "eth7", "10.0.0.8": "eth8"}.get(replaced.get("local_addr", ""))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_a_process_without_torchrun_hosts_its_store_on_the_loopback_interface() -> None:
    initialize.stand_alone()
    port = int(os.environ["MASTER_PORT"])
    assert answers(stores.LOOPBACK, port)
    assert not answers(OTHER, port)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
