"""Blocks of host memory that the processes of a node share.

In stages 2 and 3 of the paged states, processes that train the same part of the model hold the same gradients and
parameters. With a distributed optimizer each of them updates only its own shard, so one block per node is enough:

    gradients of process 0, 1, 2, 3  -- added in any order -->  | block of the node |
    work on the whole block (zeroing, scaling)              -->  | 0  | 1  | 2  | 3  |   a part for each process

One process makes anonymous memory (``memfd_create``). The other processes open it by the path of its file descriptor in
``/proc``, which the system allows to the same user only. The memory has no name in any file system, and the system
frees it when the last process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from bytescale_ext.activation.arena import pinned_block


def host_block(num_elements: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Allocate zeros [num_elements] in host memory as one block; ``pinned`` registers it with the GPU."""
    num_bytes = num_elements * dtype.itemsize
    memory = pinned_block(num_bytes) if pinned else torch.zeros(num_bytes, dtype=torch.uint8)
    return memory.view(dtype)


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of a process group that run on this node.

    Attributes:
        group: process group.
        device: device of its collectives.
        ranks: positions in the group of the ranks on this node, ascending.
    """

    group: dist.ProcessGroup
    device: torch.device
    ranks: tuple[int, ...]

    @classmethod
    def find(cls, group: dist.ProcessGroup, device: torch.device) -> NodeRanks:
        """Find the ranks on this node. All ranks of the group must call this (one all-gather of 8 bytes per rank)."""
        nodes = gathered([node_number()], group, device)
        own = nodes[group.rank()]
        return cls(group, device, tuple(rank for rank, node in enumerate(nodes) if node == own))

    @property
    def position(self) -> int:
        """Position of this process among the processes of the node."""
        return self.ranks.index(self.group.rank())

    def own(self, num_elements: int) -> slice:
        """Return this process's part of ``num_elements`` elements, which the processes of the node divide."""
        position, count = self.position, len(self.ranks)
        return slice(position * num_elements // count, (position + 1) * num_elements // count)

    def barrier(self) -> None:
        """Wait until all ranks of the group have come here, and their work on host memory is visible."""
        token = torch.zeros(1, device=self.device)
        dist.all_reduce(token, group=self.group)
        token.item()  # the host waits for the device


def node_number() -> int:
    """Return a number of 63 bits that processes have in common if they can open each other's file descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    digest = hashlib.sha256("\n".join([boot, *spaces, str(os.getuid())]).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def gathered(numbers: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the numbers of all ranks of a group, in the order of the ranks (one all-gather)."""
    mine = torch.tensor(numbers, device=device)
    everyone = torch.empty(group.size() * len(numbers), dtype=mine.dtype, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return [int(number) for number in everyone.tolist()]


class SharedBlock:
    """Memory that the processes of a node share.

    Attributes:
        memory: the memory [n], uint8, zeros at first.
        node: the processes that share it.
    """

    def __init__(self, descriptor: int, num_bytes: int, node: NodeRanks, pinned: bool) -> None:
        """Map an open file; ``pinned`` registers the memory with the GPU of this process."""
        self.node = node
        self._descriptor = descriptor
        if pinned:
            self.memory = pinned_block(num_bytes, descriptor)
        else:
            self.memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int, node: NodeRanks, pinned: bool) -> SharedBlock | None:
        """Create a block. All ranks of the group must call this (two all-gathers).

        Returns None on all ranks if a process cannot open the memory, with a warning that gives the reason.
        """
        is_first = node.position == 0
        made = os.memfd_create("bytescale") if is_first else -1
        if is_first:
            os.ftruncate(made, num_bytes)
        numbers = gathered([os.getpid(), made], node.group, node.device)
        process, descriptor = numbers[2 * node.ranks[0] :][:2]
        reason = ""
        try:
            opened = made if is_first else os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            opened, reason = -1, f"{error.strerror}: {error.filename}"
        if any(gathered([int(opened < 0)], node.group, node.device)):
            for number in {made, opened} - {-1}:
                os.close(number)
            note = f" ({reason})" if reason else ""
            warnings.warn(
                f"the processes of this node cannot share host memory{note}: each holds its own copy", stacklevel=2
            )
            return None
        return cls(opened, num_bytes, node, pinned)

    @contextlib.contextmanager
    def locked(self, part: torch.Tensor) -> Iterator[None]:
        """Keep other processes of the node from changing a part of the memory, a contiguous view of any shape."""
        start = part.data_ptr() - self.memory.data_ptr()
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, part.nbytes, start)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, part.nbytes, start)


class HostBlocks:
    """Allocates the blocks of host memory for gradients and parameters."""

    def __init__(self, shares: bool, on_cuda: bool) -> None:
        """Allocate nothing yet.

        Args:
            shares: whether the processes of a node share blocks.
            on_cuda: whether the device is a GPU, with which blocks are registered.
        """
        self._shares, self._on_cuda = shares, on_cuda
        self._nodes: dict[dist.ProcessGroup, NodeRanks] = {}
        self._blocks: dict[int, SharedBlock | None] = {}  # address -> block, or None for private memory

    @cached_property
    def device(self) -> torch.device:
        """Device of this process."""
        return torch.device("cuda", torch.cuda.current_device()) if self._on_cuda else torch.device("cpu")

    def allocate(self, num_elements: int, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
        """Allocate zeros [num_elements]. All ranks of the group must call this if blocks are shared.

        Args:
            num_elements: number of elements, above 0.
            dtype: type of an element.
            group: ranks that hold the same tensor.
        """
        node, shared = self._node(group), None
        if node is not None:
            shared = SharedBlock.create(num_elements * dtype.itemsize, node, self._on_cuda)
            self._shares = shared is not None
        tensor = host_block(num_elements, dtype, self._on_cuda) if shared is None else shared.memory.view(dtype)
        self._blocks[tensor.data_ptr()] = shared
        return tensor

    def _node(self, group: dist.ProcessGroup) -> NodeRanks | None:
        """Return the ranks of a group on this node; None if they do not share memory."""
        if not self._shares or group.size() == 1:
            return None
        if group not in self._nodes:
            self._nodes[group] = NodeRanks.find(group, self.device)
        return self._nodes[group]

    def __contains__(self, tensor: torch.Tensor | None) -> bool:
        """Return whether a tensor is a block."""
        return tensor is not None and tensor.data_ptr() in self._blocks

    def shared(self, tensor: torch.Tensor) -> SharedBlock | None:
        """Return the shared memory of a block [n]; None if the memory is private."""
        return self._blocks[tensor.data_ptr()]

    def num_bytes(self, tensor: torch.Tensor) -> int:
        """Return this process's share of the bytes of a block [n]."""
        shared = self.shared(tensor)
        return tensor.nbytes if shared is None else -(-tensor.nbytes // len(shared.node.ranks))
