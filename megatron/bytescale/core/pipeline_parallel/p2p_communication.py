"""Sends and receives between pipeline stages, for micro-batches of different sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from bytescale_ext.metrics import StepClock
from bytescale_ext.plan.schedule import receive_order


class ShapedP2PCommunicator(P2PCommunicator):
    """Megatron's communicator of one step's pipeline, told the shape of every tensor that it receives.

    Megatron asks the neighbour for the shape of each tensor before it sends it (``variable_seq_lengths``): a message
    more, and on GPUs a synchronisation. Here both ends know the plan, so the answer comes from it and nothing is
    sent. Tensors are [rows, batch, hidden]; under sequence parallelism rows are this tensor-parallel rank's.
    """

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: Any, clock: StepClock | None = None) -> None:
        """``clock`` notes when it begins to wait."""
        config = copy.copy(config)
        config.variable_seq_lengths = True
        config.batch_p2p_sync = False  # for a fault of old versions of PyTorch; the host would wait at each message
        super().__init__(pp_group, config)
        self._from_previous: Iterator[int] = iter(())
        self._from_next: Iterator[int] = iter(())
        self._batch = 1
        self._clock = clock

    def expect(self, from_previous: Iterable[int], from_next: Iterable[int], batch: int = 1) -> None:
        """Rows of each tensor to come from the stage before and the stage after, in order; samples side by side."""
        self._from_previous, self._from_next, self._batch = iter(from_previous), iter(from_next), batch

    def _communicate(self, **kwargs: Any) -> Any:
        if self._clock is not None:
            self._clock.mark("wait")
        return super()._communicate(**kwargs)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Shapes of what comes from the previous and from the next stage. Asks nobody."""
        shapes = [
            [next(rows), self._batch, self.config.hidden_size] if is_received else []
            for rows, is_received in ((self._from_previous, recv_prev), (self._from_next, recv_next))
        ]
        return shapes[0], shapes[1]

    def check_all_received(self, with_backward: bool) -> None:
        """At the end of a step: every tensor of the plan has come."""
        left = list(self._from_previous), list(self._from_next) if with_backward else []
        assert left == ([], []), f"{left=}"


class PlannedP2PCommunicator(ShapedP2PCommunicator):
    """The communicator of a step of micro-batches of different sizes."""

    def __init__(
        self, pp_group: torch.distributed.ProcessGroup, config: Any, num_rows: Sequence[int], clock: StepClock | None
    ) -> None:
        """``num_rows``: of each micro-batch, as it lies in memory."""
        super().__init__(pp_group, config, clock)
        num_chunks = config.virtual_pipeline_model_parallel_size or 1
        group_size = config.microbatch_group_size_per_vp_stage
        from_previous, from_next = (
            [num_rows[index] for index in receive_order(len(num_rows), is_end, num_chunks, group_size)]
            for is_end in (self.is_pp_first_stage, self.is_pp_last_stage)
        )
        self.expect(from_previous, from_next)
