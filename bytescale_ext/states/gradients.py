"""Gradient sums in host memory: each gradient leaves the device as soon as autograd has computed it.

A gradient is copied to slots of pinned memory, which overlaps with computation. One thread adds the slots to the sum in
order of arrival. The order and precision of the additions are the same as on a device, so the sums are bitwise equal.
Sums that the processes of a node share (``node_memory.py``) get the gradients of all of them in any order.

Gradients arrive in hooks of autograd, whose current stream is the stream on which Megatron built its DDP modules. The
copies take part in the order of the stream that computes instead: a gradient's memory is used again in this order.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.link import Ticket, make_link, wait_on_host
from bytescale_ext.plan.states.pages import NUM_GRADIENT_SLOTS as NUM_SLOTS
from bytescale_ext.states.node_memory import SharedBlock, host_block


class GradientSums:
    """Adds gradients on a device to tensors in host memory.

    Attributes:
        slots: buffers for gradients that are not added yet, uint8 [slots, slot_bytes].
    """

    def __init__(self, slot_bytes: int, on_cuda: bool) -> None:
        memory = host_block(NUM_SLOTS * slot_bytes, torch.uint8, on_cuda)
        self.slots = memory.view(NUM_SLOTS, slot_bytes)
        self._link = make_link(HostArena(memory), on_cuda)
        self._compute = torch.cuda.default_stream() if on_cuda else None
        self._thread = ThreadPoolExecutor(1, "gradients")
        self._additions: list[Future[None] | None] = [None] * NUM_SLOTS  # the last addition of each slot
        self._next = 0

    def add(self, total: torch.Tensor, gradient: torch.Tensor, shared: SharedBlock | None = None) -> None:
        """Start to add a gradient on the device to a contiguous sum of equal shape in host memory; see ``finish``.

        ``shared``: the memory of the sum if the processes of the node share it.
        """
        sums, parts = total.view(-1), gradient.detach().reshape(-1)
        length = self.slots.shape[1] // gradient.element_size()
        starts = range(0, parts.numel(), length)
        for batch in range(0, len(starts), NUM_SLOTS):
            pieces = [slice(start, start + length) for start in starts[batch : batch + NUM_SLOTS]]
            self._send([(sums[piece], parts[piece]) for piece in pieces], gradient, shared)

    def _send(
        self, pieces: list[tuple[torch.Tensor, torch.Tensor]], gradient: torch.Tensor, shared: SharedBlock | None
    ) -> None:
        """Start to copy (sum, gradient) pieces to slots and to add them; there are at most ``NUM_SLOTS`` pieces."""
        numbers = [(self._next + index) % NUM_SLOTS for index in range(len(pieces))]
        self._next = (self._next + len(pieces)) % NUM_SLOTS
        targets = []
        for number, (_, part) in zip(numbers, pieces, strict=True):
            self._wait(number)
            targets.append(self.slots[number].view(gradient.dtype)[: part.numel()])
        pairs = [(target, part) for target, (_, part) in zip(targets, pieces, strict=True)]
        with self._computing():
            ticket = self._link.write(pairs, [gradient, *(part for _, part in pieces)])
        for number, target, (total, _) in zip(numbers, targets, pieces, strict=True):
            self._additions[number] = self._thread.submit(_add, total, target, ticket, shared)

    def _computing(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that makes the computing stream current. This stream first waits for the hook's stream."""
        if self._compute is None:
            return contextlib.nullcontext()
        self._compute.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._compute)

    def _wait(self, number: int) -> None:
        """Wait until a slot is free. Re-raises the exception of its addition."""
        addition = self._additions[number]
        if addition is not None:
            addition.result()

    def finish(self) -> None:
        """Wait until all gradients have been added. Re-raises the exception of an addition."""
        for number in range(NUM_SLOTS):
            self._wait(number)
        self._link.settle()


@torch.no_grad()
def _add(total: torch.Tensor, part: torch.Tensor, ticket: Ticket, shared: SharedBlock | None = None) -> None:
    """Add a slot [n] to a sum [n] once the copy to the slot is done."""
    wait_on_host(ticket)
    with contextlib.nullcontext() if shared is None else shared.locked(total):
        total.add_(part)
