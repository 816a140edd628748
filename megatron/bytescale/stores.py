"""Stores of torch that listen at one address of this machine, instead of on all its interfaces.

A store has no password, and torch unpickles what members write into it. ``TCPStore`` itself cannot be bound to an
address, but it takes a socket that listens already (``master_listen_fd``).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"


def own_address(host: str) -> str | None:
    """Return this machine's address towards a host, or None if the host has no address or no route.

    The address towards a name of this machine is the address of that name. Nothing is sent.
    """
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    return address == "::1" or address.startswith("127.")


def hosted_store(address: str, port: int, **settings: Any) -> TCPStore:
    """Return the server of a store that listens at an address of this machine. Port 0 takes a free port.

    Raises RuntimeError if the port is in use, as TCPStore does.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise RuntimeError(f"cannot listen at {address}, port {port}: {error.strerror}") from None
        port = listener.getsockname()[1]
        fd = os.dup(listener.fileno())
    return TCPStore(address, port, is_master=True, master_listen_fd=fd, **settings)


def use_loopback() -> None:
    """Let gloo and NCCL connect over the loopback interface, if the user names no interface."""
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _LOOPBACK_INTERFACE)


def bind_rendezvous(is_one_node: bool) -> None:
    """Replace the stores that torchrun's rendezvous hosts by stores at the address of their host.

    The name of a host can mean a loopback address on the host itself (Debian's ``/etc/hosts``). Other nodes do not
    reach that address, so with several nodes such a store listens on all interfaces, and one line says so.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous, static_tcp_rendezvous

    def store(
        host: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **named: Any
    ) -> Any:
        named |= {"world_size": world_size, **({"timeout": rest[0]} if rest else {})}
        address = own_address(host) if is_master else None
        if address is not None and (is_one_node or not is_loopback(address)):
            return hosted_store(address, port, **named)
        if is_master:
            print(
                f"bytescale launch: {host} is {address or 'unknown'} on this machine, so the rendezvous listens on all "
                "interfaces; give --rdzv-endpoint an address of the job's network",
                file=sys.stderr,
            )
        return TCPStore(host, port, is_master=is_master, **named)

    class BoundHandler(dynamic_rendezvous.DynamicRendezvousHandler):
        def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
            return store(master_addr, master_port, is_master=True, multi_tenant=True)

    c10d_rendezvous_backend.TCPStore = store  # type: ignore[misc, assignment]
    static_tcp_rendezvous.TCPStore = store  # type: ignore[misc, assignment]
    dynamic_rendezvous.DynamicRendezvousHandler = BoundHandler  # type: ignore[misc]
