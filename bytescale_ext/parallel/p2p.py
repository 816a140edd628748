"""Point-to-point exchange between HDP ranks, in one process group for rings of every width.

A ring needs only sends and receives. So rings of all widths share the group of all HDP ranks, and no sequence needs a
group of its own (ByteScale section 5.1). Both ends know the shapes from the plan, so there is no handshake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from bytescale_ext.parallel.faults import exchange_error

Transfer = tuple[torch.Tensor, int]  # contiguous tensor of any shape and dtype; HDP rank at the other end


class Pending(Protocol):
    """An exchange that has been started."""

    def wait(self) -> None:
        """Return once the received tensors may be read and the sent tensors may be overwritten.

        With NCCL the current stream waits, not the host. Raises ``PeerLost`` if a peer has died.
        """


class Comm(Protocol):
    """The communication that ring attention needs: ``RingComm`` between processes, ``MailboxComm`` inside a process."""

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start sending and receiving tensors of any shape; see ``RingComm.exchange``."""


@dataclass
class ExchangeStats:
    """Traffic of a rank since the last ``reset``.

    Attributes:
        bytes_sent: bytes handed to the backend.
        num_exchanges: number of exchanges with at least one non-empty tensor.
    """

    bytes_sent: int = 0
    num_exchanges: int = 0

    def count(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Count one exchange of tensors of any shape."""
        self.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor, _ in sends)
        self.num_exchanges += any(tensor.numel() for tensor, _ in (*sends, *receives))

    def reset(self) -> None:
        """Set all counts to zero."""
        self.bytes_sent = 0
        self.num_exchanges = 0


class WorksPending:
    """Requests to the communication backend. Keeps their tensors alive until the requests are complete."""

    def __init__(
        self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], peers: Sequence[int], kind: str = "HDP"
    ) -> None:
        """``peers``: ranks at the other ends, for error messages; ``kind`` says how they are numbered."""
        self._works = tuple(works)
        self._tensors = tuple(tensors)
        self._peers = tuple(peers)
        self._kind = kind

    def wait(self) -> None:
        """Wait for all requests; see ``Pending.wait``. A second call does nothing."""
        works, self._works = self._works, ()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise exchange_error(error, self._peers, self._kind) from error
        self._tensors = ()


class RingComm:
    """Exchange through ``torch.distributed``.

    Attributes:
        rank: HDP rank of this process, which is its rank in the group.
        size: number of HDP ranks.
        stats: traffic so far, which the caller reads and resets.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        """Use a group of exactly the HDP ranks, in order (None: the default group).

        Raises:
            ValueError: this process has another rank in the group, or the group has another size.
        """
        if dist.is_initialized():
            group_rank, group_size = dist.get_rank(group), dist.get_world_size(group)
            if (group_rank, group_size) != (rank, size):
                raise ValueError(
                    f"HDP rank {rank} of {size} is rank {group_rank} of {group_size} in the process group; "
                    "pass the group of the HDP ranks, in order"
                )
        self.rank = rank
        self.size = size
        self.stats = ExchangeStats()
        self._group = group

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start sends and receives of tensors of any shape as one batch and return immediately.

        Two ranks must start the transfers between them in the same order and with equal sizes. Both ends skip empty
        tensors.

        Args:
            sends: tensors to send, which must not be overwritten before ``wait`` returns.
            receives: tensors to receive into, which are filled once ``wait`` returns.

        Raises:
            PeerLost: the connection to a peer is lost.
        """
        self.stats.count(sends, receives)
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, transfers in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in transfers
            if tensor.numel()
        ]
        peers = [peer for _, peer in (*sends, *receives)]
        try:
            works = dist.batch_isend_irecv(operations) if operations else ()
        except RuntimeError as error:
            raise exchange_error(error, peers, "HDP") from error
        return WorksPending(works, [operation.tensor for operation in operations], peers)

    def warm_up(self, device: torch.device | str) -> None:
        """Exchange one number with both neighbours. Every rank of the group must call this before the first step.

        ``batch_isend_irecv`` requires all ranks of a group to take part in its first batch. The call also creates the
        communicator before the first step, whose time would otherwise include it.
        """
        if self.size == 1:
            return
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        number = torch.zeros(1, device=device)
        self.exchange([(number, following)], [(torch.empty_like(number), previous)]).wait()
        self.exchange([(number, previous)], [(torch.empty_like(number), following)]).wait()
        self.stats.reset()
