"""Virtual ranks: several ranks that run in turn in one process and on one device.

The ring algorithm is a generator that yields its exchanges. Here an exchange goes through mailboxes, and a rank waiting
for a message yields to the next rank. Kernel timings on one GPU and tests with any number of ranks use virtual ranks,
because they need the arithmetic and not the network. A plan that deadlocks raises an error immediately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from bytescale_ext.attention.backend import Exchanges
from bytescale_ext.parallel.p2p import ExchangeStats, Pending, Transfer

Address = tuple[int, int, int]  # sender, receiver, number of the message between them


class MailboxPending:
    """The messages to receive in one exchange."""

    def __init__(self, boxes: dict[Address, torch.Tensor], receives: dict[Address, torch.Tensor]) -> None:
        self._boxes = boxes
        self._receives = receives

    def ready(self) -> bool:
        """Return whether every message has arrived."""
        return all(address in self._boxes for address in self._receives)

    def wait(self) -> None:
        """Copy the messages into the receiving tensors.

        Raises:
            RuntimeError: a message is missing, or its shape or dtype differs from the plan.
        """
        for address, tensor in self._receives.items():
            message = self._boxes.pop(address, None)
            if message is None or message.shape != tensor.shape or message.dtype != tensor.dtype:
                got = "nothing" if message is None else f"{tuple(message.shape)} {message.dtype}"
                raise RuntimeError(
                    f"virtual rank {address[1]} expected {tuple(tensor.shape)} {tensor.dtype} from rank {address[0]}, "
                    f"got {got}"
                )
            tensor.copy_(message)
        self._receives = {}


class MailboxComm:
    """The ``Comm`` of one virtual rank; ``mailbox_comms`` makes one per rank.

    As between processes, the n-th send from rank a to rank b matches the n-th receive of b from a.
    """

    def __init__(self, boxes: dict[Address, torch.Tensor], rank: int) -> None:
        self.rank = rank
        self.stats = ExchangeStats()
        self._boxes = boxes
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> MailboxPending:
        """Put messages of any shape into the mailboxes of their receivers, which copy them in ``wait``."""
        self.stats.count(sends, receives)
        for tensor, peer in sends:
            if tensor.numel():
                self._boxes[self.rank, peer, self._num_sent[peer]] = tensor
                self._num_sent[peer] += 1
        expected = {}
        for tensor, peer in receives:
            if tensor.numel():
                expected[peer, self.rank, self._num_received[peer]] = tensor
                self._num_received[peer] += 1
        return MailboxPending(self._boxes, expected)


def mailbox_comms(size: int) -> list[MailboxComm]:
    """Return the comms of ``size`` virtual ranks."""
    boxes: dict[Address, torch.Tensor] = {}
    return [MailboxComm(boxes, rank) for rank in range(size)]


def run_in_turn[Result](ranks: Sequence[Exchanges[Result]]) -> list[Result]:
    """Run the algorithm of every virtual rank to its end and return their results in order.

    Raises:
        RuntimeError: the ranks deadlock; each unfinished rank waits for a message that no rank will send.
    """
    results: dict[int, Result] = {}
    waiting: dict[int, Pending | None] = dict.fromkeys(range(len(ranks)))
    while waiting:
        runnable = [rank for rank, pending in waiting.items() if pending is None or _ready(pending)]
        if not runnable:
            raise RuntimeError(f"deadlock: virtual ranks {sorted(waiting)} wait for messages that no rank will send")
        for rank in runnable:
            pending = waiting[rank]
            if pending is not None:
                pending.wait()
            try:
                waiting[rank] = next(ranks[rank])
            except StopIteration as stop:
                results[rank] = stop.value
                del waiting[rank]
    return [results[rank] for rank in range(len(ranks))]


def _ready(pending: Pending) -> bool:
    return pending.ready() if isinstance(pending, MailboxPending) else True
