"""Stores of torch that listen at one address of this machine, instead of on all its interfaces.

A store has no password, and torch unpickles what members write into it. ``TCPStore`` itself cannot be bound to an
address, but it takes a socket that listens already (``master_listen_fd``).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_ADDRESS_OF_INTERFACE: Final = 0x8915  # SIOCGIFADDR of Linux


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


def is_own(host: str) -> bool:
    """Return whether a host is this machine, by its name or by an address of any interface."""
    if host == socket.gethostname():
        return True
    address = own_address(host)
    return address is not None and (is_loopback(address) or address in _addresses_of(host))


def _addresses_of(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def hosting_address(host: str, is_one_node: bool) -> str | None:
    """Return the address at which this machine hosts a store, or takes part in a job, or None without a route.

    The machine's own name can mean a loopback address on the machine itself (Debian's ``/etc/hosts``). Other nodes do
    not reach that address, so with several nodes it is replaced by the address of the machine's network.

    Raises:
        ValueError: the machine has several networks, or none.
    """
    address = own_address(host)
    is_hidden = address is None or is_loopback(address)
    if is_one_node or not is_hidden or _names_loopback(host) or not is_own(host):
        return address
    addresses = network_addresses()
    if len(addresses) != 1:
        raise ValueError(
            f"{host} is {address or 'unknown'} on this machine, which other nodes do not reach, and its networks have "
            f"{', '.join(sorted(addresses.values())) or 'no addresses'}: give --rdzv-endpoint (or --master-addr) this "
            "machine's address in the network of the job"
        )
    return next(iter(addresses.values()))


def _names_loopback(host: str) -> bool:
    """Return whether a host is a loopback address on each machine: all nodes are on one machine."""
    return host == "localhost" or is_loopback(host)


def network_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface of this machine, except the loopback interface."""
    if sys.platform != "linux":
        return {}
    import fcntl

    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, name.encode().ljust(256, b"\0"))
            except OSError:  # an interface without an address
                continue
            addresses[name] = socket.inet_ntoa(request[20:24])
    return {name: address for name, address in addresses.items() if not is_loopback(address)}


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


def use_interface_of(address: str) -> None:
    """Let gloo listen at the interface of an IPv4 address, if the user names no interface.

    gloo takes the address of the machine's name otherwise, which can be a loopback address or one of another network.
    """
    for name, found in network_addresses().items():
        if found == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def bind_rendezvous(is_one_node: bool) -> None:
    """Replace the stores that torchrun's rendezvous hosts by stores at the address of their host.

    A node also recognizes its addresses if its name means another address.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous, static_tcp_rendezvous

    def store(
        host: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **named: Any
    ) -> Any:
        named |= {"world_size": world_size, **({"timeout": rest[0]} if rest else {})}
        if not is_master:
            return TCPStore(host, port, is_master=False, **named)
        address = hosting_address(host, is_one_node)
        if address is None:
            raise RuntimeError(f"this machine has no address towards {host}")
        return hosted_store(address, port, **named)

    class BoundHandler(dynamic_rendezvous.DynamicRendezvousHandler):
        def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
            return store(master_addr, master_port, is_master=True, multi_tenant=True)

    c10d_rendezvous_backend.TCPStore = store  # type: ignore[misc, assignment]
    c10d_rendezvous_backend._matches_machine_hostname = is_own
    static_tcp_rendezvous.TCPStore = store  # type: ignore[misc, assignment]
    dynamic_rendezvous.DynamicRendezvousHandler = BoundHandler  # type: ignore[misc]
