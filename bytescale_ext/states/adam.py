"""Adam on pages of host memory and of a disk: torch's update, page by page, beside copies to and from a device.

``PagedAdam`` works through hooks of the optimizer that it takes over, so that whoever saves, loads or schedules that
optimizer finds what torch would have there: parameters, their states by name, parameter groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.optim.adam import adam

from bytescale_ext.activation.link import Link, Ticket, make_link
from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.check import check_moves, check_pages
from bytescale_ext.plan.states.late import late_bytes
from bytescale_ext.plan.states.moves import DISK_KINDS, Kind, Move, step_moves
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.plan.states.tiers import FileLayout, pages_on_disk, tiered_host_bytes
from bytescale_ext.states.page_file import PageFile, file_of
from bytescale_ext.states.pages import COPIES, MOMENTS, PageMemory
from bytescale_ext.states.tiered import TieredMemory
from bytescale_ext.states.updates.group_counts import count_update, counts_of, take_count


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


@dataclass(frozen=True)
class Figures:
    """What Adam reads of a parameter group; a scheduler changes some of it in each step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, number: int) -> Figures:
        """Return those of a group of the optimizer."""
        group = optimizer.param_groups[number]
        beta1, beta2 = group["betas"]
        return cls(
            group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["decoupled_weight_decay"]
        )  # fmt: skip


class PagedAdam:
    """The pages of one optimizer, and its steps.

    Attributes:
        table: which pages hold what.
        on_disk: the pages that lie on a disk.
        host: pages in host memory, and the buffers of the link.
        tiers: all pages, in host memory and on the disk; None if no page is on a disk.
        link: to the device.
        is_fused: run torch's fused kernel, which takes a third of the time and rounds differently. On CPU the resident
            optimizer does not run it, so pages do not either; on a GPU no kernel rounds like it anyway.
    """

    def __init__(
        self, optimizer: torch.optim.Adam, owners: Sequence[Owner], config: StateConfig, on_cuda: bool, part: int = 0
    ) -> None:
        """Move all states of ``optimizer`` to pages. ``owners``: one for each of its parameters, in its order.

        ``part``: number of the optimizer on this rank. Raises ValueError where its pages take more host memory, or
        space of a disk, than they may.
        """
        groups = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        tensors = [
            StateTensor(f"{group}.{number}", owner.parameter.numel(), group, owner.has_copy)
            for number, (group, owner) in enumerate(zip(groups, owners, strict=True))
        ]
        self.table = lay_out(tensors, config.page_bytes)
        self.on_disk = frozenset[int]()
        self._late_bytes = late_bytes(
            len(self.table.pages), self.table.num_copies, config.page_bytes, config.update_steps
        )
        if config.nvme is not None:
            self.on_disk = pages_on_disk(self.table, config.host_bytes - self._late_bytes)
        config.check_fits(self.host_bytes, self.file_bytes)
        self._moves = step_moves(self.table, self.on_disk)
        check_pages(self.table)
        check_moves(self.table, self._moves, self.on_disk)
        self._owners = owners
        self._has_host_gradients = config.stage > 1
        self.tiers: TieredMemory | None = None
        if config.nvme is not None and self.on_disk:
            file = PageFile(file_of(config.nvme.folder, config.nvme.rank, part), FileLayout.of(self.table))
            self.tiers = TieredMemory(self.table, self.on_disk, file, on_cuda)
        self.host = self.tiers.host if self.tiers is not None else PageMemory(self.table, on_cuda)
        self.is_fused = on_cuda
        self.link: Link = make_link(self.host.arena, on_cuda)
        self._with_copy = [number for number, owner in enumerate(owners) if owner.has_copy]
        for number in self._with_copy:
            self._of_tensor(COPIES, number).copy_(owners[number].parameter.detach())
        self._attach_copies()
        self._bind_states(optimizer)
        self._hook(optimizer)

    @property
    def host_bytes(self) -> int:
        """Host memory of the pages that do not lie on a disk, of what is under way, and of late updates."""
        return tiered_host_bytes(self.table, self.on_disk) + self._late_bytes

    @property
    def file_bytes(self) -> int:
        """Space of the disk."""
        return FileLayout.of(self.table).num_bytes if self.on_disk else 0

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's steps, and lend it all states where it saves or loads them."""
        optimizer.register_step_pre_hook(self._step)
        optimizer.register_load_state_dict_post_hook(self._bind_states)
        optimizer.register_state_dict_pre_hook(partial(self.lend, changed=False))
        optimizer.register_load_state_dict_pre_hook(partial(self.lend, changed=True))

    def begin_step(self) -> None:
        """Let gradients, on the device or in host memory, be attached to parameters whose values are elsewhere."""
        for number in self._with_copy:
            owner = self._owners[number]
            device = "cpu" if self._has_host_gradients else owner.target.device
            stand_in = torch.full((1,), math.nan, dtype=torch.float32, device=device)
            owner.parameter.data = stand_in.expand(owner.parameter.shape)

    def lend(self, optimizer: torch.optim.Optimizer, *_: object, changed: bool) -> None:
        """Have all states in the optimizer until its next step; ``changed``: they may be written to.

        Raises OSError or PagesDamaged where the disk fails.
        """
        if self.tiers is not None and self.tiers.lend(changed):
            self._attach_copies()
            for number, owner in enumerate(self._owners):
                for plane, name in enumerate(MOMENTS):
                    optimizer.state[owner.parameter][name] = self._of_tensor(plane, number)

    def _of_tensor(self, plane: int, number: int) -> torch.Tensor:
        """Return a plane's part of a parameter, in its shape."""
        return (self.tiers or self.host).of_tensor(plane, number, self._owners[number].parameter.shape)

    def _attach_copies(self) -> None:
        """Have the optimizer's parameters with a float32 copy be the copies in the pages."""
        for number in self._with_copy:
            self._owners[number].parameter.data = self._of_tensor(COPIES, number)

    def _bind_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy states that were loaded into the pages, and make the optimizer hold those."""
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for number, (owner, group) in enumerate(zip(self._owners, groups, strict=True)):
            state = optimizer.state[owner.parameter]
            for plane, name in enumerate(MOMENTS):
                page = self._of_tensor(plane, number)
                if name in state:
                    page.copy_(state[name])
                state[name] = page
            take_count(optimizer, group, owner.parameter)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Take the optimizer's step. It then finds no gradients and does nothing."""
        if self.tiers is not None:
            self._hide(optimizer)
            self.tiers.begin_step()
        _Step(self.tiers or self.host, self.link, optimizer, self._owners, self.is_fused).run(self._moves)
        for owner in self._owners:
            owner.parameter.grad = None
        count_update(optimizer)
        if self.tiers is not None:
            self.tiers.end_step(list(itertools.takewhile(lambda move: move.kind in DISK_KINDS, self._moves)))
            return
        self._attach_copies()

    def _hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Let go of states that were lent; whoever reads the moments without a hook fails."""
        for owner in self._owners:
            for name in MOMENTS:
                optimizer.state[owner.parameter][name] = torch.empty(owner.parameter.shape, device="meta")


class _Step:
    """One step of an optimizer."""

    def __init__(
        self,
        memory: PageMemory | TieredMemory,
        link: Link,
        optimizer: torch.optim.Optimizer,
        owners: Sequence[Owner],
        is_fused: bool,
    ) -> None:
        self._memory, self._link, self._optimizer, self._owners = memory, link, optimizer, owners
        self._is_fused = is_fused
        self._fetched: dict[int, Ticket] = {}  # by buffer
        self._returned: dict[int, Ticket] = {}
        self._counts = counts_of(optimizer)
        self._gradients = [flat_gradient(owner.parameter) for owner in owners]

    def run(self, moves: Sequence[Move]) -> None:
        """Make the moves, and let further computing on the device wait for the results."""
        kinds = {Kind.FETCH: self._fetch, Kind.UPDATE: self._update, Kind.RETURN: self._return}
        if isinstance(self._memory, TieredMemory):
            kinds |= dict.fromkeys(DISK_KINDS, self._memory.move)
        for move in moves:
            kinds[move.kind](move)
        for ticket in self._returned.values():
            self._link.wait(ticket)
        self._link.settle()

    def _fetch(self, move: Move) -> None:
        page = self._memory.table.pages[move.page]
        if not page.has_copy:  # parameters are copied to where the last results may still be copied from
            wait_on_host(self._returned.get(move.buffer))
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
        wait_on_host(self._fetched[move.buffer])
        wait_on_host(self._returned.get(move.buffer))
        value = memory.values[move.buffer][: page.num_elements]
        first, second, *copy = memory.of_page(move.page)
        parameter = copy[0] if copy else value
        step = self._counts[page.spans[0].tensor].clone()
        gradient = memory.gradients[move.buffer][: page.num_elements]
        figures = Figures.of(self._optimizer, page.group)
        take_adam_step((parameter, gradient, first, second), step, figures, self._is_fused)
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


def take_adam_step(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    step: torch.Tensor,
    figures: Figures,
    is_fused: bool,
) -> None:
    """Update a page: its parameters, gradients and both moments, float32 [n] each.

    ``step``: the scalar number of updates before. ``is_fused``: see ``PagedAdam``.
    """
    parameter, gradient, first, second = states
    adam(
        [parameter], [gradient], [first], [second], [], [step],
        fused=is_fused, foreach=False, amsgrad=False, maximize=False, **asdict(figures),
    )  # fmt: skip


def flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient [n] of a parameter of any shape."""
    assert parameter.grad is not None, f"{parameter.shape=}"
    return parameter.grad.detach().view(-1)


def wait_on_host(ticket: Ticket) -> None:
    """Wait until copies are done, because the processor goes on with what they wrote or read."""
    if ticket is not None:
        ticket.synchronize()
