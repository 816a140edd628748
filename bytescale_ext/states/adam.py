"""Adam with states in pages of host memory and of a disk. Pages are updated one by one, overlapped with copies.

``PagedAdam`` hooks into an existing torch optimizer. Code that saves, loads or schedules the optimizer finds
parameters, states and parameter groups where torch would have them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.optim.adam import adam

from bytescale_ext.activation.link import Link, Ticket, make_link, wait_on_host
from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.check import check_moves, check_pages
from bytescale_ext.plan.states.late import late_bytes
from bytescale_ext.plan.states.moves import DISK_KINDS, Kind, Move, step_moves
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.plan.states.tiers import FileLayout, pages_on_disk, tiered_host_bytes
from bytescale_ext.states.group_counts import count_update, store_count, update_counts
from bytescale_ext.states.page_file import PageFile, page_file_path
from bytescale_ext.states.pages import COPIES, MOMENTS, PageMemory
from bytescale_ext.states.scaling import RowFactors
from bytescale_ext.states.tiered import TieredMemory


@dataclass(frozen=True)
class PagedParameter:
    """A parameter of the optimizer and the parameter of the model that it updates.

    Attributes:
        parameter: the optimizer's parameter, of any shape. Its gradient is on the device when the optimizer steps.
        target: the model's parameter [n] on the device. It shares memory with ``parameter``, or has fewer bits.
    """

    parameter: torch.Tensor
    target: torch.Tensor

    @property
    def has_copy(self) -> bool:
        """Whether pages hold a float32 copy of the parameter, because the model's parameter has fewer bits."""
        return self.target.dtype is not torch.float32


@dataclass(frozen=True)
class Hyperparameters:
    """Adam's hyperparameters of one parameter group, as set by the scheduler for one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, number: int) -> Hyperparameters:
        """Read the hyperparameters of one parameter group."""
        group = optimizer.param_groups[number]
        beta1, beta2 = group["betas"]
        return cls(
            group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["decoupled_weight_decay"]
        )  # fmt: skip


class PagedAdam:
    """An optimizer with its states in pages.

    Attributes:
        table: contents of each page.
        on_disk: pages that are stored on a disk.
        host: pages in host memory, and the buffers of the link.
        tiers: all pages, in host memory and on the disk; None if no page is on a disk.
        link: link to the device.
        is_fused: whether updates run torch's fused kernel, which takes a third of the time and rounds differently. On
            CPU pages do not use it, so that results equal the resident optimizer's. A GPU's optimizer rounds
            differently from any CPU kernel, so there pages use the fused kernel.
    """

    def __init__(
        self,
        optimizer: torch.optim.Adam,
        parameters: Sequence[PagedParameter],
        config: StateConfig,
        on_cuda: bool,
        part: int = 0,
    ) -> None:
        """Move all states of ``optimizer`` to pages.

        Args:
            optimizer: optimizer whose steps are taken over.
            parameters: one for each parameter of the optimizer, in its order.
            config: size of pages, limits of host memory and disk.
            on_cuda: whether the device is a GPU.
            part: number of the optimizer on this rank.

        Raises:
            ValueError: the pages need more host memory or disk space than allowed.
        """
        groups = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        tensors = [
            StateTensor(f"{group}.{number}", paged.parameter.numel(), group, paged.has_copy)
            for number, (group, paged) in enumerate(zip(groups, parameters, strict=True))
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
        self._parameters = parameters
        self._has_host_gradients = config.stage > 1
        self.tiers: TieredMemory | None = None
        if config.nvme is not None and self.on_disk:
            file = PageFile(page_file_path(config.nvme.folder, config.nvme.rank, part), FileLayout.of(self.table))
            self.tiers = TieredMemory(self.table, self.on_disk, file, on_cuda)
        self.host = self.tiers.host if self.tiers is not None else PageMemory(self.table, on_cuda)
        self.is_fused = on_cuda
        self.link: Link = make_link(self.host.arena, on_cuda)
        self._late_factors: dict[int, list[tuple[RowFactors, int]]] = {}  # by parameter
        self._with_copy = [number for number, paged in enumerate(parameters) if paged.has_copy]
        for number in self._with_copy:
            self._tensor_view(COPIES, number).copy_(parameters[number].parameter.detach())
        self._attach_copies()
        self._bind_states(optimizer)
        self._hook(optimizer)

    @property
    def host_bytes(self) -> int:
        """Host memory of pages that are not on a disk, of buffers, and of late updates."""
        return tiered_host_bytes(self.table, self.on_disk) + self._late_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file on the disk; 0 without a disk."""
        return FileLayout.of(self.table).num_bytes if self.on_disk else 0

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the optimizer's steps, and lend it all states before it saves or loads them."""
        optimizer.register_step_pre_hook(self._step)
        optimizer.register_load_state_dict_post_hook(self._bind_states)
        optimizer.register_state_dict_pre_hook(partial(self.lend, changed=False))
        optimizer.register_load_state_dict_pre_hook(partial(self.lend, changed=True))

    def begin_step(self) -> None:
        """Place parameters that have a float32 copy on the gradients' device, so that gradients can be attached.

        Until the step the parameters are NaN, expanded from a single element.
        """
        for number in self._with_copy:
            paged = self._parameters[number]
            device = "cpu" if self._has_host_gradients else paged.target.device
            nan = torch.full((1,), math.nan, dtype=torch.float32, device=device)
            paged.parameter.data = nan.expand(paged.parameter.shape)

    def lend(self, optimizer: torch.optim.Optimizer, *_: object, changed: bool) -> None:
        """Make all states available in the optimizer until its next step.

        ``changed`` says that the caller may write to them. Raises OSError or PagesDamaged if the disk fails.
        """
        if self.tiers is None:
            return
        if self.tiers.lend(changed or bool(self._late_factors)):
            self._attach_copies()
            for number, paged in enumerate(self._parameters):
                for plane, name in enumerate(MOMENTS):
                    optimizer.state[paged.parameter][name] = self._tensor_view(plane, number)
        for number, factors in self._late_factors.items():
            for rows, start in factors:
                rows.scale_(self._tensor_view(COPIES, number).view(-1), start)
        self._late_factors.clear()

    def scale_copy(self, parameter: torch.Tensor, rows: RowFactors, start: int) -> None:
        """Scale the float32 copy of a parameter by factors of rows, in host memory, between two steps.

        If pages are on a disk, all pages are scaled when they are updated or lent next.

        Args:
            parameter: parameter of the optimizer that has a copy, of any shape.
            rows: factors ``[rows]`` in host memory.
            start: first element of the parameter in the tensor with these rows.
        """
        number = next(number for number in self._with_copy if self._parameters[number].parameter is parameter)
        if self.tiers is None:
            rows.scale_(self._tensor_view(COPIES, number).view(-1), start)
        else:
            self._late_factors.setdefault(number, []).append((rows, start))

    def _tensor_view(self, plane: int, number: int) -> torch.Tensor:
        """Return the part of a plane that belongs to a parameter, in the parameter's shape."""
        return (self.tiers or self.host).tensor_view(plane, number, self._parameters[number].parameter.shape)

    def _attach_copies(self) -> None:
        """Point the optimizer's parameters to their float32 copies in the pages."""
        for number in self._with_copy:
            self._parameters[number].parameter.data = self._tensor_view(COPIES, number)

    def _bind_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy loaded states into the pages, and make the optimizer's states views of the pages."""
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for number, (paged, group) in enumerate(zip(self._parameters, groups, strict=True)):
            state = optimizer.state[paged.parameter]
            for plane, name in enumerate(MOMENTS):
                view = self._tensor_view(plane, number)
                if name in state:
                    view.copy_(state[name])
                state[name] = view
            store_count(optimizer, group, paged.parameter)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Take the optimizer's step, and remove the gradients so that the optimizer itself does nothing."""
        if self.tiers is not None:
            self._hide(optimizer)
            self.tiers.begin_step()
        step = _Step(self.tiers or self.host, self.link, optimizer, self._parameters, self.is_fused)
        step.late_factors = self._late_factors
        step.run(self._moves)
        self._late_factors.clear()
        for paged in self._parameters:
            paged.parameter.grad = None
        count_update(optimizer)
        if self.tiers is not None:
            self.tiers.end_step(list(itertools.takewhile(lambda move: move.kind in DISK_KINDS, self._moves)))
            return
        self._attach_copies()

    def _hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace lent states by meta tensors, so that reading the moments without a hook fails."""
        for paged in self._parameters:
            for name in MOMENTS:
                optimizer.state[paged.parameter][name] = torch.empty(paged.parameter.shape, device="meta")


class _Step:
    """One optimizer step over all pages.

    Attributes:
        late_factors: factors of the rows of copies, by parameter, which are applied before the update.
    """

    def __init__(
        self,
        memory: PageMemory | TieredMemory,
        link: Link,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[PagedParameter],
        is_fused: bool,
    ) -> None:
        self._memory, self._link, self._optimizer, self._parameters = memory, link, optimizer, parameters
        self._is_fused = is_fused
        self.late_factors: Mapping[int, Sequence[tuple[RowFactors, int]]] = {}
        self._fetched: dict[int, Ticket] = {}  # by buffer
        self._returned: dict[int, Ticket] = {}  # by buffer
        self._counts = update_counts(optimizer)
        self._gradients = [flat_gradient(paged.parameter) for paged in parameters]

    def run(self, moves: Sequence[Move]) -> None:
        """Run the moves, and make later work on the device wait for the results."""
        actions = {Kind.FETCH: self._fetch, Kind.UPDATE: self._update, Kind.RETURN: self._return}
        if isinstance(self._memory, TieredMemory):
            actions |= dict.fromkeys(DISK_KINDS, self._memory.move)
        for move in moves:
            actions[move.kind](move)
        for ticket in self._returned.values():
            self._link.wait(ticket)
        self._link.settle()

    def _fetch(self, move: Move) -> None:
        page = self._memory.table.pages[move.page]
        if not page.has_copy:  # the fetch overwrites the buffer's last results, which may still be in transfer
            wait_on_host(self._returned.get(move.buffer))
        pairs = []
        for part in page.parts:
            in_page = slice(part.page_start, part.page_start + part.num_elements)
            in_tensor = slice(part.tensor_start, part.tensor_start + part.num_elements)
            pairs.append((self._memory.gradients[move.buffer][in_page], self._gradients[part.tensor][in_tensor]))
            if not page.has_copy:
                target = self._parameters[part.tensor].target
                pairs.append((self._memory.values[move.buffer][in_page], target[in_tensor]))
        self._fetched[move.buffer] = self._link.write(pairs, [source for _, source in pairs])

    def _update(self, move: Move) -> None:
        memory, page = self._memory, self._memory.table.pages[move.page]
        wait_on_host(self._fetched[move.buffer])
        wait_on_host(self._returned.get(move.buffer))
        value = memory.values[move.buffer][: page.num_elements]
        first, second, *copy = memory.page_views(move.page)
        parameter = copy[0] if copy else value
        for part in page.parts:
            for rows, start in self.late_factors.get(part.tensor, ()):
                in_page = slice(part.page_start, part.page_start + part.num_elements)
                rows.scale_(parameter[in_page], start + part.tensor_start)
        step = self._counts[page.parts[0].tensor].clone()
        gradient = memory.gradients[move.buffer][: page.num_elements]
        hyperparameters = Hyperparameters.of(self._optimizer, page.group)
        take_adam_step((parameter, gradient, first, second), step, hyperparameters, self._is_fused)
        if page.has_copy:
            self._result(move).copy_(parameter)

    def _return(self, move: Move) -> None:
        result = self._result(move)
        pairs = [
            (
                self._parameters[part.tensor].target[part.tensor_start : part.tensor_start + part.num_elements],
                result[part.page_start : part.page_start + part.num_elements],
            )
            for part in self._memory.table.pages[move.page].parts
        ]
        self._returned[move.buffer] = self._link.read(pairs, None)

    def _result(self, move: Move) -> torch.Tensor:
        """Return the results [elements in use] in a buffer, in the type of the model's parameters."""
        page = self._memory.table.pages[move.page]
        dtype = self._parameters[page.parts[0].tensor].target.dtype
        return self._memory.values[move.buffer].view(dtype)[: page.num_elements]


def take_adam_step(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    step: torch.Tensor,
    hyperparameters: Hyperparameters,
    is_fused: bool,
) -> None:
    """Update one page in place.

    Args:
        states: parameters, gradients, first and second moments, float32 [n] each.
        step: number of earlier updates, a scalar.
        hyperparameters: hyperparameters of the page's parameter group.
        is_fused: see ``PagedAdam``.
    """
    parameter, gradient, first, second = states
    adam(
        [parameter], [gradient], [first], [second], [], [step],
        fused=is_fused, foreach=False, amsgrad=False, maximize=False, **asdict(hyperparameters),
    )  # fmt: skip


def flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the flattened gradient [n] of a parameter of any shape."""
    assert parameter.grad is not None, f"{parameter.shape=}"
    return parameter.grad.detach().view(-1)
