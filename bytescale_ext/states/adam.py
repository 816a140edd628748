"""Adam on pages of host memory: the same update as torch's optimizer, page by page, beside copies to and from a device.

``PagedAdam`` works through hooks of the optimizer that it takes over, so that whoever saves, loads or schedules that
optimizer finds what torch would have there: parameters, their states by name, parameter groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adam import adam

from bytescale_ext.activation.link import Link, Ticket, make_link
from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.check import check_moves, check_pages
from bytescale_ext.plan.states.moves import Kind, Move, step_moves
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.states.pages import PageMemory


@dataclass(frozen=True)
class Owner:
    """What the optimizer calls a parameter, and where its result goes.

    Attributes:
        parameter: of any shape; its gradient is on the device when the optimizer steps.
        target: the model's parameter [n] on the device. It shares memory with ``parameter``, or has fewer bits.
    """

    parameter: torch.Tensor
    target: torch.Tensor

    @property
    def has_copy(self) -> bool:
        """Whether the float32 value is a copy of the model's parameter."""
        return self.target.dtype is not torch.float32


class PagedAdam:
    """The pages of one optimizer, and its steps.

    Attributes:
        table: which pages hold what.
        link: to the device.
        is_fused: run torch's fused kernel, which takes a third of the time and rounds differently. On CPU the resident
            optimizer does not run it, so pages do not either; on a GPU no kernel rounds like it anyway.
    """

    def __init__(
        self, optimizer: torch.optim.Adam, owners: Sequence[Owner], config: StateConfig, on_cuda: bool
    ) -> None:
        """Move all states of ``optimizer`` to pages. ``owners``: one for each of its parameters, in its order.

        Raises ValueError where they take more host memory than they may.
        """
        groups = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        tensors = [
            StateTensor(f"{group}.{number}", owner.parameter.numel(), group, owner.has_copy)
            for number, (group, owner) in enumerate(zip(groups, owners, strict=True))
        ]
        self.table = lay_out(tensors, config.page_bytes)
        self._moves = step_moves(self.table)
        check_pages(self.table)
        check_moves(self.table, self._moves)
        config.check_fits(self.table.host_bytes)
        self._owners = owners
        self._memory = PageMemory(self.table, on_cuda)
        self.is_fused = on_cuda
        self.link: Link = make_link(self._memory.arena, on_cuda)
        self._copies = {
            number: self._memory.of_tensor(self._memory.copies, number, owner.parameter.shape)
            for number, owner in enumerate(owners)
            if owner.has_copy
        }
        for number, copy in self._copies.items():
            copy.copy_(owners[number].parameter)
        self._show_copies()
        self._bind_states(optimizer)
        optimizer.register_step_pre_hook(self._step)
        optimizer.register_load_state_dict_post_hook(self._bind_states)

    def begin_step(self) -> None:
        """Let gradients on the device be attached to parameters whose values are on the host."""
        for number in self._copies:
            owner = self._owners[number]
            stand_in = torch.zeros(1, dtype=torch.float32, device=owner.target.device)
            owner.parameter.data = stand_in.expand(owner.parameter.shape)

    def _show_copies(self) -> None:
        """Make the parameters that have copies show them, for whoever saves or loads them."""
        for number, copy in self._copies.items():
            self._owners[number].parameter.data = copy

    def _bind_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy states that were loaded into the pages, and make the optimizer hold those."""
        for number, owner in enumerate(self._owners):
            state = optimizer.state[owner.parameter]
            for name, plane in self._memory.moments.items():
                page = self._memory.of_tensor(plane, number, owner.parameter.shape)
                if name in state:
                    page.copy_(state[name])
                state[name] = page
            state["step"] = state["step"].clone() if "step" in state else torch.tensor(0.0)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Take the optimizer's step. It then finds no gradients and does nothing."""
        _Step(self._memory, self.link, optimizer, self._owners, self.is_fused).run(self._moves)
        for owner in self._owners:
            owner.parameter.grad = None
            optimizer.state[owner.parameter]["step"] += 1
        self._show_copies()


class _Step:
    """One step of an optimizer."""

    def __init__(
        self,
        memory: PageMemory,
        link: Link,
        optimizer: torch.optim.Optimizer,
        owners: Sequence[Owner],
        is_fused: bool,
    ) -> None:
        self._memory, self._link, self._optimizer, self._owners = memory, link, optimizer, owners
        self._is_fused = is_fused
        self._fetched: dict[int, Ticket] = {}  # by buffer
        self._returned: dict[int, Ticket] = {}
        self._gradients = [_flat_gradient(owner.parameter) for owner in owners]

    def run(self, moves: Sequence[Move]) -> None:
        """Make the moves, and let further computing on the device wait for the results."""
        kinds = {Kind.FETCH: self._fetch, Kind.UPDATE: self._update, Kind.RETURN: self._return}
        for move in moves:
            kinds[move.kind](move)
        for ticket in self._returned.values():
            self._link.wait(ticket)
        self._link.settle()

    def _fetch(self, move: Move) -> None:
        page = self._memory.table.pages[move.page]
        if not page.has_copy:  # parameters are copied to where the last results may still be copied from
            _wait_on_host(self._returned.get(move.buffer))
        pairs = []
        for span in page.spans:
            here = slice(span.page_start, span.page_start + span.num_elements)
            there = slice(span.tensor_start, span.tensor_start + span.num_elements)
            pairs.append((self._memory.gradients[move.buffer][here], self._gradients[span.tensor][there]))
            if not page.has_copy:
                pairs.append((self._memory.values[move.buffer][here], self._owners[span.tensor].target[there]))
        self._fetched[move.buffer] = self._link.write(pairs, [source for _, source in pairs])

    def _update(self, move: Move) -> None:
        memory, page = self._memory, self._memory.table.pages[move.page]
        _wait_on_host(self._fetched[move.buffer])
        _wait_on_host(self._returned.get(move.buffer))
        value = memory.values[move.buffer][: page.num_elements]
        parameter = memory.of_page(memory.copies, move.page) if page.has_copy else value
        first, second = (memory.of_page(plane, move.page) for plane in memory.moments.values())
        group = self._optimizer.param_groups[page.group]
        step = self._optimizer.state[self._owners[page.spans[0].tensor].parameter]["step"].clone()
        beta1, beta2 = group["betas"]
        gradient = memory.gradients[move.buffer][: page.num_elements]
        adam(
            [parameter], [gradient], [first], [second], [], [step],
            fused=self._is_fused, foreach=False, amsgrad=False, maximize=False,
            decoupled_weight_decay=group["decoupled_weight_decay"],
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        if page.has_copy:
            self._result(move).copy_(parameter)

    def _return(self, move: Move) -> None:
        result = self._result(move)
        pairs = [
            (
                self._owners[span.tensor].target[span.tensor_start : span.tensor_start + span.num_elements],
                result[span.page_start : span.page_start + span.num_elements],
            )
            for span in self._memory.table.pages[move.page].spans
        ]
        self._returned[move.buffer] = self._link.read(pairs, None)

    def _result(self, move: Move) -> torch.Tensor:
        """Return the part [elements in use] of a buffer that is returned, in the type of the model's parameters."""
        page = self._memory.table.pages[move.page]
        dtype = self._owners[page.spans[0].tensor].target.dtype
        return self._memory.values[move.buffer].view(dtype)[: page.num_elements]


def _flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n] of a parameter of any shape."""
    assert parameter.grad is not None, f"{parameter.shape=}"
    return parameter.grad.detach().view(-1)


def _wait_on_host(ticket: Ticket) -> None:
    """Wait until copies are done, because the processor goes on with what they wrote or read."""
    if ticket is not None:
        ticket.synchronize()
