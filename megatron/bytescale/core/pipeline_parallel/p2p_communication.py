"""Messages between pipeline stages, with shapes known from the schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from bytescale_ext.measure.metrics import StepClock
from bytescale_ext.parallel.faults import exchange_error
from bytescale_ext.parallel.p2p import WorksPending
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule
from bytescale_ext.plan.schedule.messages import received_actions
from megatron.bytescale.core.parallel_state import StageLinks, VirtualLinks

_NEIGHBOUR = "a neighbouring stage, global"


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a stage receives in one step.

    Attributes:
        from_previous, from_next: rows of each tensor from the previous and from the next stage, in order.
        batch: number of samples side by side in a tensor.
        num_first: number of forwards before the stage alternates forward and backward passes.
    """

    from_previous: tuple[int, ...]
    from_next: tuple[int, ...]
    batch: int
    num_first: int


def stage_communicator(
    config: ModelParallelConfig,
    schedule: SliceSchedule,
    num_rows: Callable[[Action], int],
    links: StageLinks | VirtualLinks | None = None,
    batch: int = 1,
    clock: StepClock | None = None,
) -> ShapedP2PCommunicator:
    """Return the communicator of this stage for one step.

    Args:
        config: Megatron's configuration of the model.
        schedule: actions of all stages.
        num_rows: action -> rows of the tensor that it receives, on this tensor-parallel rank.
        links: process groups of neighbouring stages if stages receive ahead or have overlapped virtual stages; else
            None.
        batch: number of samples side by side in a tensor.
        clock: records when the stage begins to wait.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    from_previous, from_next = (tuple(map(num_rows, actions)) for actions in received_actions(schedule, stage))
    expected = ExpectedTensors(from_previous, from_next, batch, schedule.num_first_forwards(stage))
    if isinstance(links, VirtualLinks):
        return OverlappedP2PCommunicator(group, config, expected, clock, links)
    if links is not None:
        return ReceiveAheadP2PCommunicator(group, config, expected, clock, links)
    if schedule.slicing.zero_bubble:
        return NeighbourP2PCommunicator(group, config, expected, clock, StageLinks(group, group))
    return ShapedP2PCommunicator(group, config, expected, clock)


class ShapedP2PCommunicator(P2PCommunicator):
    """Megatron's communicator for one step, with the shape of every received tensor known in advance.

    With ``variable_seq_lengths`` Megatron sends the shape of each tensor in a separate message, which costs a
    synchronisation on GPUs. Here both sides take the shapes from the schedule. Tensors are [rows, batch, hidden].
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        expected: ExpectedTensors,
        clock: StepClock | None,
    ) -> None:
        config = copy.copy(config)
        config.variable_seq_lengths = True
        config.batch_p2p_sync = False  # needed only by old PyTorch; it blocks the host per message
        super().__init__(pp_group, config)
        self._from_previous: Iterator[int] = iter(expected.from_previous)
        self._from_next: Iterator[int] = iter(expected.from_next)
        self._expected = expected
        self._clock = clock

    @property
    def total_stages(self) -> int:
        """Pretend to have ``num_first`` later stages, because Megatron warms up with one forward for each of them."""
        return int(self.current_stage) + 1 + self._expected.num_first

    def _communicate(self, **kwargs: Any) -> tuple[object, ...]:
        self._mark_wait()
        try:
            return super()._communicate(**kwargs)
        except RuntimeError as error:
            before = kwargs["recv_prev"] or kwargs["tensor_send_prev"] is not None
            after = kwargs["recv_next"] or kwargs["tensor_send_next"] is not None
            peers = [self.prev_rank] * before + [self.next_rank] * after
            raise exchange_error(error, peers, _NEIGHBOUR) from error

    def _mark_wait(self) -> None:
        if self._clock is not None:
            self._clock.mark("wait")

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the shapes to receive from the previous and from the next stage, without communicating."""
        before = self._shape(next(self._from_previous)) if recv_prev else []
        after = self._shape(next(self._from_next)) if recv_next else []
        return before, after

    def _shape(self, num_rows: int) -> list[int]:
        return [num_rows, self._expected.batch, self.config.hidden_size]

    def wait_for(self, tensor: object) -> None:
        """Return when a received tensor of any shape is ready to read; here every exchange has already waited."""

    def _start(
        self, group: dist.ProcessGroup | None, peer: int, sent: torch.Tensor | None, rows: int | None
    ) -> _Exchange:
        """Post one batch: send ``sent`` and receive a tensor of ``rows`` rows; either may be None for no message."""
        received = None
        if rows is not None:
            device, dtype = torch.cuda.current_device(), self.config.pipeline_dtype
            received = torch.empty(self._shape(rows), dtype=dtype, device=device, requires_grad=True)
        ends = ((dist.isend, sent), (dist.irecv, received))
        operations = [dist.P2POp(act, tensor, peer, group) for act, tensor in ends if tensor is not None]
        works = dist.batch_isend_irecv(operations) if operations else ()
        tensors = [operation.tensor for operation in operations]
        return _Exchange(received, WorksPending(works, tensors, [peer], _NEIGHBOUR))

    def check_all_received(self, training: bool) -> None:
        """Assert at the end of a step that every expected tensor has arrived; an evaluation has no gradients."""
        left = list(self._from_previous), list(self._from_next) if training else []
        assert left == ([], []), f"{left=}"


class NeighbourP2PCommunicator(ShapedP2PCommunicator):
    """A communicator that lets a stage work while messages are in flight, without virtual stages.

    Every exchange is with one neighbour.

    Attributes:
        while_waiting: function that runs after each exchange is posted, before the stage waits for it.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        expected: ExpectedTensors,
        clock: StepClock | None,
        links: StageLinks,
    ) -> None:
        super().__init__(pp_group, config, expected, clock)
        self._links = links
        self.while_waiting: Callable[[], None] = lambda: None

    def _communicate(self, **kwargs: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        self._mark_wait()
        output, gradient = kwargs["tensor_send_next"], kwargs["tensor_send_prev"]
        if output is not None or kwargs["recv_next"]:
            assert gradient is None and not kwargs["recv_prev"], "an exchange must have one neighbour"
            return None, self._finish(self._with_next(output, kwargs["recv_next"])), None
        return self._exchange_with_previous(gradient, kwargs["recv_prev"]), None, None

    def _exchange_with_previous(self, gradient: torch.Tensor | None, receives: bool) -> torch.Tensor | None:
        return self._finish(self._with_previous(gradient, receives))

    def _finish(self, exchange: _Exchange) -> torch.Tensor | None:
        self.while_waiting()
        return exchange.wait()

    def _with_previous(self, gradient: torch.Tensor | None, receives: bool) -> _Exchange:
        rows = next(self._from_previous, None) if receives else None
        return self._start(self._links.before, self.prev_rank, gradient, rows)

    def _with_next(self, output: torch.Tensor | None, receives: bool) -> _Exchange:
        return self._start(self._links.after, self.next_rank, output, next(self._from_next) if receives else None)


class ReceiveAheadP2PCommunicator(NeighbourP2PCommunicator):
    """The communicator for a previous stage that is two forwards ahead (``Slicing.receives_ahead``).

    Megatron receives an input in the same exchange that returns a gradient, and waits for both, so the stage would lose
    one of the two forwards. This communicator posts the receive of an input one exchange early, and waits for it where
    Megatron asks for the input.
    """

    _posted: _Exchange | None = None

    def _exchange_with_previous(self, gradient: torch.Tensor | None, receives: bool) -> torch.Tensor | None:
        if not receives:
            return self._finish(self._with_previous(gradient, False))
        due = self._posted or self._with_previous(None, True)
        self._posted = self._with_previous(gradient, True)
        if self._posted.received is None:  # no more inputs
            self._finish(self._posted)
            self._posted = None
        return self._finish(due)

    def check_all_received(self, training: bool) -> None:
        """Assert at the end of a step that every expected tensor has arrived and has been waited for."""
        super().check_all_received(training)
        assert self._posted is None, f"{self._posted=}"


class OverlappedP2PCommunicator(ShapedP2PCommunicator):
    """The communicator of slices with virtual stages; messages overlap with the passes.

    Megatron's overlapped schedule posts a send right after its pass, and a receive at least one pass before its use.
    Megatron counts handles to know when to wait, and may wait for a later message than necessary. Here the pass that
    uses a tensor waits for that tensor (``wait_for``), and a send waits only for the previous send on its link. So
    every message is posted no later and waited for no earlier than without overlap, and schedules are checked for the
    case without overlap (``plan.schedule.messages``).
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        expected: ExpectedTensors,
        clock: StepClock | None,
        links: VirtualLinks,
    ) -> None:
        super().__init__(pp_group, config, expected, clock)
        self._links = links
        self._received: dict[int, _Exchange] = {}
        self._sent: dict[dist.ProcessGroup, _Exchange] = {}

    def _communicate(
        self, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, _WaitsLater] | None]:
        links, before, after = self._links, None, None
        sent = {"send_next": kwargs["tensor_send_next"], "send_prev": kwargs["tensor_send_prev"]}
        self._send(links.outputs_out, self.next_rank, sent["send_next"])
        self._send(links.gradients_out, self.prev_rank, sent["send_prev"])
        if kwargs["recv_prev"]:
            before = self._receive(links.outputs_in, self.prev_rank, next(self._from_previous))
        if kwargs["recv_next"]:
            after = self._receive(links.gradients_in, self.next_rank, next(self._from_next))
        if kwargs.get("wait_on_reqs", True):
            return before, after, None
        posted = {**sent, "recv_prev": before, "recv_next": after}
        return before, after, {name: _WaitsLater() for name, tensor in posted.items() if tensor is not None}

    def _send(self, group: dist.ProcessGroup, peer: int, tensor: torch.Tensor | None) -> None:
        """Send a tensor of any shape after the previous send on this link; keep its memory until it is sent."""
        if tensor is None:
            return
        if group in self._sent:
            self._mark_wait()
            self._sent.pop(group).wait()
        # Megatron frees its tensor's memory (``deallocate_output_tensor``); a second tensor object keeps it.
        self._sent[group] = self._start(group, peer, tensor.detach(), None)

    def _receive(self, group: dist.ProcessGroup, peer: int, rows: int | None) -> torch.Tensor | None:
        if rows is None:
            return None
        exchange = self._start(group, peer, None, rows)
        assert exchange.received is not None
        self._received[id(exchange.received)] = exchange
        return exchange.received

    def wait_for(self, tensor: object) -> None:
        """Return when a received tensor of any shape is ready to read."""
        if tensor is not None:
            self._mark_wait()
            self._received.pop(id(tensor)).wait()

    def check_all_received(self, training: bool) -> None:
        """Assert at the end of a step that every expected tensor has arrived and been used; wait for the last sends."""
        super().check_all_received(training)
        for exchange in self._sent.values():
            exchange.wait()
        self._sent.clear()
        assert not self._received, f"{len(self._received)=}"


class _WaitsLater:
    """The handle of a message for Megatron; waiting is left to the pass that needs the message."""

    def wait(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Exchange:
    """An exchange with one neighbour; ``received`` is valid after ``wait``."""

    received: torch.Tensor | None
    pending: WorksPending

    def wait(self) -> torch.Tensor | None:
        self.pending.wait()
        return self.received
