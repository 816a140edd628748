"""Adam beside training: a thread updates pages while later steps compute with the parameters that are there.

    step                   0      1      2      3
    computes with          P      P      P+U0   P+U1     the gradients of one step are missing
    thread                        U0     U1     U2       Un: the update with the gradients of step n

A step copies its gradients, reduced and clipped, to host memory. Each ``update_steps``-th one first waits for the
running update and takes its parameters, and then starts the next update, with the mean of the gradients since. When an
update is taken thus depends on the number of steps alone and never on time: all ranks take the same one in the same
step, as Megatron needs where they hold equal parameters, and a run can be repeated to the last bit.

After Angel-PTM (Nie et al. 2023, lock-free updating), where an update takes whatever gradients there are once the last
one is done. With ``update_steps`` 1 this is the delayed update of ZeRO-Offload (Ren et al. 2021, one-step delay).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bytescale_ext.activation.link import Pairs, Ticket
from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.late import result_bytes
from bytescale_ext.plan.states.moves import DISK_KINDS, Kind
from bytescale_ext.states.adam import Figures, Owner, PagedAdam, flat_gradient, take_adam_step, wait_on_host
from bytescale_ext.states.gradients import host_block
from bytescale_ext.states.updates.group_counts import count_update, counts_of


@dataclass(frozen=True)
class Update:
    """What an update is given.

    Attributes:
        gradients: float32 [pages, elements of a page], sums.
        num_steps: how many steps have added to them.
        figures: of each parameter group, those of the last of these steps.
        counts: updates before this one, of each parameter; scalars.
        tickets: copies that must be done first.
    """

    gradients: torch.Tensor
    num_steps: int
    figures: Sequence[Figures]
    counts: Sequence[torch.Tensor]
    tickets: Sequence[Ticket]


class LockFreeAdam(PagedAdam):
    """The pages of one optimizer, whose updates run on a thread.

    Attributes:
        missing: steps whose gradients the parameters lack.
        wait_seconds: how long steps have waited for updates so far.
        submit: starts a function beside training.
    """

    def __init__(
        self, optimizer: torch.optim.Adam, owners: Sequence[Owner], config: StateConfig, on_cuda: bool, part: int = 0
    ) -> None:
        """See ``PagedAdam``."""
        super().__init__(optimizer, owners, config, on_cuda, part)
        self.missing, self.wait_seconds = 0, 0.0
        self.submit: Callable[[Callable[[], None]], Future[None]] = ThreadPoolExecutor(1, "updates").submit
        self._optimizer, self._update_steps = optimizer, config.update_steps
        num_pages, elements = len(self.table.pages), self.table.page_elements
        num_sums = 2 if self._update_steps > 1 else 1
        block = host_block(num_sums * num_pages * elements, torch.float32, on_cuda)
        self._sums = list(block.view(num_sums, num_pages, elements))  # the first one is filled
        results = result_bytes(num_pages, self.table.num_copies, self.table.page_bytes)
        self._results = self._cut(host_block(results, torch.uint8, on_cuda))
        self._num_given = 0  # steps whose gradients are in the sum that is filled
        self._num_running = 0  # those of the running update
        self._running: Future[None] | None = None
        self._taken: Ticket = None
        self._has_values = False

    def _cut(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the part [elements in use] of each page's results, in the type of the model's parameters."""
        parts, start = [], 0
        for page in self.table.pages:
            dtype = self._owners[page.spans[0].tensor].target.dtype
            stop = start + self.table.page_elements * dtype.itemsize
            parts.append(block[start:stop].view(dtype)[: page.num_elements])
            start = stop
        return parts

    def flush(self) -> None:
        """Have the updates of all steps in the parameters of this rank. Raises OSError or PagesDamaged."""
        with torch.no_grad():
            self._take()
            if self._num_given:
                self._start()
                self._take()

    def lend(self, optimizer: torch.optim.Optimizer, *_: object, changed: bool) -> None:
        """See ``PagedAdam``; after ``flush``."""
        assert not self.missing, f"{self.missing=}: flush first"
        self._has_values &= not changed
        super().lend(optimizer, changed=changed)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Add the gradients of a step, and start an update where it is due. The optimizer then finds no gradients."""
        is_due = self._num_given + 1 == self._update_steps
        if is_due:
            self._take()
        if self.tiers is not None:
            self._hide(optimizer)
        gradients = [flat_gradient(owner.parameter) for owner in self._owners]
        ticket = self._add(gradients)
        for owner in self._owners:
            owner.parameter.grad = None
        if is_due:
            self._start(ticket)
        if self.tiers is None:
            self._attach_copies()

    def _add(self, gradients: Sequence[torch.Tensor]) -> Ticket:
        """Add gradients [n] of each parameter to the sum. Returns copies that are under way."""
        total = self._sums[0]
        pairs = [
            [
                (total[number, span.page_start : span.page_start + span.num_elements],
                 gradients[span.tensor][span.tensor_start : span.tensor_start + span.num_elements])
                for span in page.spans
            ]
            for number, page in enumerate(self.table.pages)
        ]  # fmt: skip
        self._num_given += 1
        self.missing += 1
        if self._num_given == 1:
            return self._to_host([pair for of_page in pairs for pair in of_page])
        buffers: list[Pairs] = []
        for number, of_page in enumerate(pairs):
            buffer = self.host.gradients[number % len(self.host.gradients)]
            targets = torch.split(buffer[: self.table.pages[number].num_elements], [len(sum_) for sum_, _ in of_page])
            buffers.append([(target, source) for target, (_, source) in zip(targets, of_page, strict=True)])
        ticket = self._to_host(buffers[0])
        for number, of_page in enumerate(pairs):  # while a page is added, the next one is copied
            wait_on_host(ticket)
            ticket = self._to_host(buffers[number + 1]) if number + 1 < len(pairs) else None
            for (sum_, _), (source, _) in zip(of_page, buffers[number], strict=True):
                sum_.add_(source)
        return None

    def _to_host(self, pairs: Pairs) -> Ticket:
        """Start copies to host memory, for which further computing on the device waits."""
        ticket = self.link.write(pairs, [source for _, source in pairs])
        self.link.settle()
        return ticket

    def _start(self, ticket: Ticket = None) -> None:
        """Start an update with the sum, once the copies of a ticket are done."""
        values = None
        if not self._has_values:
            values = self._to_host([pair for pair in self._results_of_targets() if pair[0].dtype is torch.float32])
            self._has_values = True
        update = Update(
            gradients=self._sums[0],
            num_steps=self._num_given,
            figures=[Figures.of(self._optimizer, group) for group in range(len(self._optimizer.param_groups))],
            counts=counts_of(self._optimizer),
            tickets=(ticket, values, self._taken),
        )
        count_update(self._optimizer)
        self._running = self.submit(lambda: self._run(update))
        self._num_running, self._num_given = self._num_given, 0
        self._sums.reverse()

    @torch.no_grad()
    def _run(self, update: Update) -> None:
        """Update all pages and leave the parameters in the results. Runs beside training."""
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

    def _update(self, number: int, update: Update) -> None:
        page, result = self.table.pages[number], self._results[number]
        gradient = update.gradients[number, : page.num_elements]
        if update.num_steps > 1:
            gradient.div_(update.num_steps)
        first, second, *copy = (self.tiers or self.host).of_page(number)
        parameter = copy[0] if copy else result
        states = parameter, gradient, first, second
        count = update.counts[page.spans[0].tensor].clone()
        take_adam_step(states, count, update.figures[page.group], self.is_fused)
        if copy:
            result.copy_(parameter)

    def _take(self) -> None:
        """Wait for the running update, if any, and copy its parameters to the model's. Raises what it has raised."""
        if self._running is None:
            return
        begun = time.perf_counter()
        self._running.result()
        self.wait_seconds += time.perf_counter() - begun
        self._running = None
        pairs = [(target, result) for result, target in self._results_of_targets()]
        self._taken = self.link.read(pairs, None)
        self.link.wait(self._taken)
        self.missing -= self._num_running

    def _results_of_targets(self) -> Pairs:
        """Return parts of the results, each with the part of the model's parameters that it belongs to."""
        return [
            (result[span.page_start : span.page_start + span.num_elements],
             self._owners[span.tensor].target[span.tensor_start : span.tensor_start + span.num_elements])
            for page, result in zip(self.table.pages, self._results, strict=True)
            for span in page.spans
        ]  # fmt: skip
