"""Point-to-point exchange between HDP ranks, one process group for rings of every width.

Rings need only sends and receives, so rings of all widths share the one group of HDP ranks, and no group is created for
a sequence (ByteScale section 5.1). Shapes come from the plan, so there is no handshake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from bytescale_ext.parallel.faults import lost_in_exchange

Transfer = tuple[torch.Tensor, int]  # contiguous tensor of any shape and dtype; HDP rank at the other end


class Pending(Protocol):
    """An exchange that was started."""

    def wait(self) -> None:
        """Return when the received tensors may be read and the sent ones overwritten.

        With NCCL the current stream waits, not the host. Raises ``PeerLost`` when a peer has died.
        """


class Comm(Protocol):
    """The communication that ring attention needs: ``RingComm`` between processes, ``MailboxComm`` inside one."""

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start sending and receiving tensors of any shape; see ``RingComm.exchange``."""


@dataclass
class ExchangeStats:
    """What a rank has sent since the last ``reset``.

    Attributes:
        bytes_sent: bytes handed to the backend.
        num_exchanges: calls of ``exchange`` with at least one tensor that is not empty.
    """

    bytes_sent: int = 0
    num_exchanges: int = 0

    def count(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Count one exchange of tensors of any shape."""
        self.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor, _ in sends)
        self.num_exchanges += any(tensor.numel() for tensor, _ in (*sends, *receives))

    def reset(self) -> None:
        """Restart from zero."""
        self.bytes_sent = 0
        self.num_exchanges = 0


class WorksPending:
    """Requests of the communication backend; keeps their tensors alive until they are done."""

    def __init__(
        self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], peers: Sequence[int], kind: str = "HDP"
    ) -> None:
        """``peers``: ranks at the other ends, HDP ranks or another ``kind``, for the message of an error."""
        self._works = tuple(works)
        self._tensors = tuple(tensors)
        self._peers = tuple(peers)
        self._kind = kind

    def wait(self) -> None:
        """See ``Pending.wait``. A second call does nothing."""
        works, self._works = self._works, ()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise lost_in_exchange(error, self._peers, self._kind) from error
        self._tensors = ()


class RingComm:
    """Exchange through ``torch.distributed``.

    Attributes:
        rank: my HDP rank, which is my rank in the group.
        size: the number of HDP ranks.
        stats: what was sent; the caller reads and resets it.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        """Use a group that holds exactly the HDP ranks in order (None: the default group).

        Raises:
            ValueError: this process has another rank in the group, or the group has another size.
        """
        if dist.is_initialized():
            place = (dist.get_rank(group), dist.get_world_size(group))
            if place != (rank, size):
                raise ValueError(
                    f"HDP rank {rank} of {size} is rank {place[0]} of {place[1]} in the process group; "
                    "give the group that holds the HDP ranks in order"
                )
        self.rank = rank
        self.size = size
        self.stats = ExchangeStats()
        self._group = group

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Start sends and receives of tensors of any shape as one batch and return immediately.

        Two ranks must start the transfers between them in the same order, with equal sizes. Empty tensors are skipped
        on both sides; both know the sizes from the plan.

        Args:
            sends: must not be overwritten before ``wait`` returns.
            receives: filled when ``wait`` returns.

        Raises:
            PeerLost: the connection to a peer is gone.
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
            raise lost_in_exchange(error, peers, "HDP") from error
        return WorksPending(works, [operation.tensor for operation in operations], peers)

    def warm_up(self, device: torch.device | str) -> None:
        """Exchange one number with both neighbours; every rank of the group must call this before the first step.

        The first batch of a group must include all its ranks (see ``batch_isend_irecv``), and creating a communicator
        inside a step would count as step time.
        """
        if self.size == 1:
            return
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        mine = torch.zeros(1, device=device)
        self.exchange([(mine, following)], [(torch.empty_like(mine), previous)]).wait()
        self.exchange([(mine, previous)], [(torch.empty_like(mine), following)]).wait()
        self.stats.reset()
