"""Asynchronous Adam: a thread updates pages while later steps compute with older parameters.

    step                   0      1      2      3
    computes with          P      P      P+U0   P+U1     the gradients of one step are missing
    thread                        U0     U1     U2       Un: the update with the gradients of step n

A step copies its gradients, reduced and clipped, to host memory. Every ``update_steps`` steps it waits for the running
update, copies the updated parameters to the model, and starts the next update with the mean of the gradients since
then. The step of an update depends only on the number of steps, never on time. So all ranks apply the same update in
the same step, which Megatron needs if ranks share parameters, and runs are bitwise reproducible.

The method follows Angel-PTM (Nie et al. 2023, lock-free updating). There an update starts as soon as the last update is
done, with the gradients present at that time. With ``update_steps`` 1 it is the delayed update of ZeRO-Offload (Ren et
al. 2021, one-step delay).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bytescale_ext.activation.link import Pairs, Ticket, wait_on_host
from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.late import result_bytes
from bytescale_ext.plan.states.moves import DISK_KINDS, Kind
from bytescale_ext.states.adam import (
    Hyperparameters,
    PagedAdam,
    PagedParameter,
    flat_gradient,
    take_adam_step,
)
from bytescale_ext.states.group_counts import count_update, update_counts
from bytescale_ext.states.node_memory import host_block


@dataclass(frozen=True)
class UpdateInput:
    """Input of one update.

    Attributes:
        gradients: gradients summed over steps, float32 [pages, elements of a page].
        num_steps: number of steps in the sums.
        hyperparameters: hyperparameters of each parameter group in the last of these steps.
        counts: number of earlier updates of each parameter, as scalars.
        tickets: copies that must be done before the update.
    """

    gradients: torch.Tensor
    num_steps: int
    hyperparameters: Sequence[Hyperparameters]
    counts: Sequence[torch.Tensor]
    tickets: Sequence[Ticket]


class LockFreeAdam(PagedAdam):
    """A ``PagedAdam`` whose updates run on a thread.

    Attributes:
        missing: number of steps whose gradients the parameters lack.
        wait_seconds: total seconds that steps have waited for updates.
        submit: function that starts another function on the thread.
    """

    def __init__(
        self,
        optimizer: torch.optim.Adam,
        parameters: Sequence[PagedParameter],
        config: StateConfig,
        on_cuda: bool,
        part: int = 0,
    ) -> None:
        """Move all states of ``optimizer`` to pages; see ``PagedAdam``."""
        super().__init__(optimizer, parameters, config, on_cuda, part)
        self.missing, self.wait_seconds = 0, 0.0
        self.submit: Callable[[Callable[[], None]], Future[None]] = ThreadPoolExecutor(1, "updates").submit
        self._optimizer, self._update_steps = optimizer, config.update_steps
        num_pages, elements = len(self.table.pages), self.table.page_elements
        num_sums = 2 if self._update_steps > 1 else 1
        block = host_block(num_sums * num_pages * elements, torch.float32, on_cuda)
        self._sums = list(block.view(num_sums, num_pages, elements))  # steps add their gradients to the first
        results = result_bytes(num_pages, self.table.num_copies, self.table.page_bytes)
        self._results = self._split_results(host_block(results, torch.uint8, on_cuda))
        self._num_summed = 0  # steps in the first sum
        self._num_running = 0  # steps in the running update
        self._running: Future[None] | None = None
        self._copied: Ticket = None  # the last copy of results to the model
        self._has_values = False  # the results hold the model's float32 parameters

    def _split_results(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the results [elements in use] of each page, as views of ``block`` [bytes] in the model's type."""
        parts, start = [], 0
        for page in self.table.pages:
            dtype = self._parameters[page.parts[0].tensor].target.dtype
            stop = start + self.table.page_elements * dtype.itemsize
            parts.append(block[start:stop].view(dtype)[: page.num_elements])
            start = stop
        return parts

    def flush(self) -> None:
        """Apply the gradients of all steps to the parameters of this rank.

        Raises OSError or PagesDamaged if the disk fails.
        """
        with torch.no_grad():
            self._apply_running()
            if self._num_summed:
                self._start()
                self._apply_running()

    def lend(self, optimizer: torch.optim.Optimizer, *_: object, changed: bool) -> None:
        """See ``PagedAdam.lend``. Call ``flush`` before."""
        assert not self.missing, f"{self.missing=}: flush first"
        self._has_values &= not changed
        super().lend(optimizer, changed=changed)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Sum up the gradients of a step and start an update if it is due; remove the gradients as in ``PagedAdam``."""
        is_due = self._num_summed + 1 == self._update_steps
        if is_due:
            self._apply_running()
        if self.tiers is not None:
            self._hide(optimizer)
        gradients = [flat_gradient(paged.parameter) for paged in self._parameters]
        ticket = self._add(gradients)
        for paged in self._parameters:
            paged.parameter.grad = None
        if is_due:
            self._start(ticket)
        if self.tiers is None:
            self._attach_copies()

    def _add(self, gradients: Sequence[torch.Tensor]) -> Ticket:
        """Add the gradient [n] of each parameter to the sum, and return the ticket of copies that are still running."""
        total = self._sums[0]
        pairs = [
            [
                (total[number, part.page_start : part.page_start + part.num_elements],
                 gradients[part.tensor][part.tensor_start : part.tensor_start + part.num_elements])
                for part in page.parts
            ]
            for number, page in enumerate(self.table.pages)
        ]  # fmt: skip
        self._num_summed += 1
        self.missing += 1
        if self._num_summed == 1:
            return self._to_host([pair for page_pairs in pairs for pair in page_pairs])
        buffers: list[Pairs] = []
        for number, page_pairs in enumerate(pairs):
            buffer = self.host.gradients[number % len(self.host.gradients)]
            sizes = [len(sum_) for sum_, _ in page_pairs]
            targets = torch.split(buffer[: self.table.pages[number].num_elements], sizes)
            buffers.append([(target, source) for target, (_, source) in zip(targets, page_pairs, strict=True)])
        ticket = self._to_host(buffers[0])
        for number, page_pairs in enumerate(pairs):  # the next page is copied while this page is added
            wait_on_host(ticket)
            ticket = self._to_host(buffers[number + 1]) if number + 1 < len(pairs) else None
            for (sum_, _), (source, _) in zip(page_pairs, buffers[number], strict=True):
                sum_.add_(source)
        return None

    def _to_host(self, pairs: Pairs) -> Ticket:
        """Start copies to host memory, and make later work on the device wait for them."""
        ticket = self.link.write(pairs, [source for _, source in pairs])
        self.link.settle()
        return ticket

    def _start(self, ticket: Ticket = None) -> None:
        """Start an update with the summed gradients. It waits for the copies of the ticket."""
        values = None
        if not self._has_values:
            values = self._to_host([pair for pair in self._result_pairs() if pair[0].dtype is torch.float32])
            self._has_values = True
        groups = range(len(self._optimizer.param_groups))
        update = UpdateInput(
            gradients=self._sums[0],
            num_steps=self._num_summed,
            hyperparameters=[Hyperparameters.of(self._optimizer, group) for group in groups],
            counts=update_counts(self._optimizer),
            tickets=(ticket, values, self._copied),
        )
        count_update(self._optimizer)
        self._running = self.submit(lambda: self._run(update))
        self._num_running, self._num_summed = self._num_summed, 0
        self._sums.reverse()

    @torch.no_grad()
    def _run(self, update: UpdateInput) -> None:
        """Update all pages and store the new parameters in the results. Runs on the thread."""
        for ticket in update.tickets:
            wait_on_host(ticket)
        if self.tiers is not None:
            self.tiers.begin_step()
        for move in self._moves:
            if self.tiers is not None and move.kind in DISK_KINDS:
                self.tiers.move(move)
            elif move.kind is Kind.UPDATE:
                self._update(move.page, update)
        if self.tiers is not None:
            self.tiers.end_step(list(itertools.takewhile(lambda move: move.kind in DISK_KINDS, self._moves)))

    def _update(self, number: int, update: UpdateInput) -> None:
        page, result = self.table.pages[number], self._results[number]
        gradient = update.gradients[number, : page.num_elements]
        if update.num_steps > 1:
            gradient.div_(update.num_steps)
        first, second, *copy = (self.tiers or self.host).page_views(number)
        parameter = copy[0] if copy else result
        states = parameter, gradient, first, second
        count = update.counts[page.parts[0].tensor].clone()
        take_adam_step(states, count, update.hyperparameters[page.group], self.is_fused)
        if copy:
            result.copy_(parameter)

    def _apply_running(self) -> None:
        """Wait for the running update, if any, and copy its results to the model. Re-raises the update's exception."""
        if self._running is None:
            return
        begun = time.perf_counter()
        self._running.result()
        self.wait_seconds += time.perf_counter() - begun
        self._running = None
        pairs = [(target, result) for result, target in self._result_pairs()]
        self._copied = self.link.read(pairs, None)
        self.link.wait(self._copied)
        self.missing -= self._num_running

    def _result_pairs(self) -> Pairs:
        """Return (part of the results, corresponding part of the model's parameters) of each part of a page."""
        return [
            (result[part.page_start : part.page_start + part.num_elements],
             self._parameters[part.tensor].target[part.tensor_start : part.tensor_start + part.num_elements])
            for page, result in zip(self.table.pages, self._results, strict=True)
            for part in page.parts
        ]  # fmt: skip
