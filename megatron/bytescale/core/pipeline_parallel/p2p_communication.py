"""Sends and receives between pipeline stages, for micro-batches of different sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from bytescale_ext.measure.metrics import StepClock
from bytescale_ext.parallel.p2p import WorksPending
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.schedule.messages import received_actions
from megatron.bytescale.core.parallel_state import StageLinks


class ShapedP2PCommunicator(P2PCommunicator):
    """Megatron's communicator of one step's pipeline, which knows the shape of every tensor that it receives.

    With ``variable_seq_lengths`` Megatron sends the shape of each tensor in a message of its own, which costs a
    synchronisation on GPUs. Here both sides take the shapes from the plan and send none. Tensors are
    [rows, batch, hidden]; under sequence parallelism rows are those of this tensor-parallel rank.
    """

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: Any, clock: StepClock | None = None) -> None:
        """``clock``: marks where waiting begins."""
        config = copy.copy(config)
        config.variable_seq_lengths = True
        config.batch_p2p_sync = False  # works around old versions of PyTorch, and blocks the host at each message
        super().__init__(pp_group, config)
        self._from_previous: Iterator[int] = iter(())
        self._from_next: Iterator[int] = iter(())
        self._batch = 1
        self._num_first: int | None = None
        self._clock = clock

    def expect(
        self, from_previous: Iterable[int], from_next: Iterable[int], batch: int = 1, num_first: int | None = None
    ) -> None:
        """Set what the step will receive.

        Args:
            from_previous, from_next: rows of each tensor from the previous and from the next stage, in order.
            batch: samples side by side.
            num_first: forwards before the first "one forward, one backward"; None for Megatron's own number.
        """
        self._from_previous, self._from_next, self._batch = iter(from_previous), iter(from_next), batch
        self._num_first = num_first

    @property
    def total_stages(self) -> int:
        """Pretend to have ``num_first`` downstream stages, as Megatron's warm-up has one forward for each of them."""
        stages = int(super().total_stages)
        return stages if self._num_first is None else int(self.current_stage) + 1 + self._num_first

    def _communicate(self, **kwargs: Any) -> Any:
        self._mark_wait()
        return super()._communicate(**kwargs)

    def _mark_wait(self) -> None:
        if self._clock is not None:
            self._clock.mark("wait")

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the shapes to receive from the previous and from the next stage, without communicating."""
        shapes = [
            [next(rows), self._batch, self.config.hidden_size] if is_received else []
            for rows, is_received in ((self._from_previous, recv_prev), (self._from_next, recv_next))
        ]
        return shapes[0], shapes[1]

    def check_all_received(self, with_backward: bool) -> None:
        """Assert at the end of a step that every tensor of the plan was received."""
        left = list(self._from_previous), list(self._from_next) if with_backward else []
        assert left == ([], []), f"{left=}"


class ReceiveAheadP2PCommunicator(ShapedP2PCommunicator):
    """The communicator of an order in which the previous stage is two forwards ahead (``plan.step.sizes``).

    Megatron would wait for an input together with the gradient that it sends back, and so lose one of the two
    forwards. This communicator posts each receive where Megatron asks for the input before it, and waits for it where
    Megatron asks for it. There are no virtual stages, so each exchange is with one neighbour.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: Any, links: StageLinks, clock: StepClock | None = None
    ) -> None:
        """``links``: the process groups of the exchanges."""
        super().__init__(pp_group, config, clock)
        self._links = links
        self._posted: _Exchange | None = None

    def _communicate(self, **kwargs: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        self._mark_wait()
        output, gradient = kwargs["tensor_send_next"], kwargs["tensor_send_prev"]
        if output is not None or kwargs["recv_next"]:
            assert gradient is None and not kwargs["recv_prev"], "an exchange with both neighbours"
            return None, self._with_next(output, kwargs["recv_next"]).wait(), None
        if not kwargs["recv_prev"]:
            self._with_previous(gradient, False).wait()
            return None, None, None
        due = self._posted or self._with_previous(None, True)
        self._posted = self._with_previous(gradient, True)
        if self._posted.received is None:  # there is no further input
            self._posted.wait()
            self._posted = None
        return due.wait(), None, None

    def _with_previous(self, gradient: torch.Tensor | None, receives: bool) -> _Exchange:
        rows = next(self._from_previous, None) if receives else None
        return self._start(self._links.before, self.prev_rank, gradient, rows)

    def _with_next(self, output: torch.Tensor | None, receives: bool) -> _Exchange:
        return self._start(self._links.after, self.next_rank, output, next(self._from_next) if receives else None)

    def _start(
        self, group: dist.ProcessGroup | None, peer: int, sent: torch.Tensor | None, rows: int | None
    ) -> _Exchange:
        """Post one batch: send ``sent``, and receive a tensor of ``rows`` rows; None for neither."""
        received = None
        if rows is not None:
            shape = (rows, self._batch, self.config.hidden_size)
            dtype = self.config.pipeline_dtype
            received = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True)
        ends = ((dist.isend, sent), (dist.irecv, received))
        operations = [dist.P2POp(act, tensor, peer, group) for act, tensor in ends if tensor is not None]
        works = dist.batch_isend_irecv(operations) if operations else ()
        return _Exchange(received, WorksPending(works, [operation.tensor for operation in operations]))

    def check_all_received(self, with_backward: bool) -> None:
        """Assert at the end of a step that every tensor of the plan was received and waited for."""
        super().check_all_received(with_backward)
        assert self._posted is None, f"{self._posted=}"


@dataclass(frozen=True)
class _Exchange:
    """An exchange with one neighbour; ``received`` is valid after ``wait``."""

    received: torch.Tensor | None
    pending: WorksPending

    def wait(self) -> torch.Tensor | None:
        self.pending.wait()
        return self.received


class PlannedP2PCommunicator(ShapedP2PCommunicator):
    """The communicator of a step of micro-batches of different sizes."""

    def __init__(
        self, pp_group: torch.distributed.ProcessGroup, config: Any, num_rows: Sequence[int], clock: StepClock | None
    ) -> None:
        """``num_rows``: rows of each micro-batch in memory."""
        super().__init__(pp_group, config, clock)
        num_chunks = config.virtual_pipeline_model_parallel_size or 1
        sizes = {"num_chunks": num_chunks, "group_size": config.microbatch_group_size_per_vp_stage}
        schedule = seq1f1b_schedule(self.total_stages, len(num_rows), **sizes)
        from_previous, from_next = (
            [num_rows[action.micro_batch] for action in actions]
            for actions in received_actions(schedule, self.current_stage)
        )
        self.expect(from_previous, from_next)
