"""Sums of gradients in host memory: each gradient leaves the device as soon as autograd has computed it.

A gradient is copied to slots of pinned memory beside further computing, and one thread adds the slots to the sum in the
order in which they came. Each element is thus added in the same order and precision as on a device, so that sums are
equal to the last bit.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bytescale_ext.activation.arena import HostArena, pin
from bytescale_ext.activation.link import Ticket, make_link
from bytescale_ext.plan.states.pages import NUM_GRADIENT_SLOTS as NUM_SLOTS


def host_block(num_elements: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Return zeros [num_elements] of host memory, pinned for a GPU as one block."""
    memory = torch.zeros(num_elements * dtype.itemsize, dtype=torch.uint8)
    if pinned:
        pin(memory)
    return memory.view(dtype)


class GradientSums:
    """Adds gradients of a device to tensors in host memory.

    Attributes:
        slots: uint8 [slots, slot_bytes], where gradients wait to be added.
    """

    def __init__(self, slot_bytes: int, on_cuda: bool) -> None:
        memory = host_block(NUM_SLOTS * slot_bytes, torch.uint8, on_cuda)
        self.slots = memory.view(NUM_SLOTS, slot_bytes)
        self._link = make_link(HostArena(memory), on_cuda)
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._added: list[Future[None] | None] = [None] * NUM_SLOTS  # the last addition of each slot
        self._next = 0

    def add(self, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient on the device to a contiguous sum in host memory; both have the same shape.

        Returns before it is added; see ``finish``.
        """
        sums, parts = total.view(-1), gradient.detach().reshape(-1)
        length = self.slots.shape[1] // gradient.element_size()
        starts = range(0, parts.numel(), length)
        for batch in range(0, len(starts), NUM_SLOTS):
            pieces = [slice(start, start + length) for start in starts[batch : batch + NUM_SLOTS]]
            self._send([(sums[piece], parts[piece]) for piece in pieces], gradient)

    def _send(self, pieces: list[tuple[torch.Tensor, torch.Tensor]], gradient: torch.Tensor) -> None:
        """Copy at most as many pieces as there are slots, and have them added once they have come."""
        numbers = [(self._next + place) % NUM_SLOTS for place in range(len(pieces))]
        self._next = (self._next + len(pieces)) % NUM_SLOTS
        targets = []
        for number, (_, part) in zip(numbers, pieces, strict=True):
            self._wait(number)
            targets.append(self.slots[number].view(gradient.dtype)[: part.numel()])
        ticket = self._link.write(
            [(target, part) for target, (_, part) in zip(targets, pieces, strict=True)], [gradient]
        )
        for number, target, (total, _) in zip(numbers, targets, pieces, strict=True):
            self._added[number] = self._thread.submit(_add, total, target, ticket)

    def _wait(self, number: int) -> None:
        """Wait until a slot is free. Raises what its addition has raised."""
        done = self._added[number]
        if done is not None:
            done.result()

    def finish(self) -> None:
        """Wait until all gradients have been added. Raises what an addition has raised."""
        for number in range(NUM_SLOTS):
            self._wait(number)
        self._link.settle()


@torch.no_grad()
def _add(total: torch.Tensor, part: torch.Tensor, ticket: Ticket) -> None:
    """Add a slot [n] to a sum [n] once the copy to the slot is done."""
    if ticket is not None:
        ticket.synchronize()
    total.add_(part)
