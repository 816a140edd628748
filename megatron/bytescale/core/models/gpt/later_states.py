"""Compares draft heads with the model's hidden states: the regression loss of Clover-2 (arXiv 2408.00264).

For a given token, head i should give the output layer the same state that the model gives it i + 1 tokens later in the
document. The loss is the smooth L1 distance of the two states, averaged over the hidden size. Both states are first
divided by the root mean square of the model's state, so that the weight of the loss does not depend on the scale or the
size of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from bytescale_ext.attention.layouts.later import NO_ROW, later_rows
from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.parallel.p2p import Pending


@dataclass(frozen=True)
class LaterStates:
    """The model's states at the tokens after each row.

    Attributes:
        table: states [n, h], including states from other ranks.
        rows: row of ``table`` for the state 1 to ``count`` tokens after each row of this rank, int64 [s / ranks,
            count].
        group: tensor-parallel ranks if each has its own rows (sequence parallelism); else None.
    """

    table: torch.Tensor
    rows: torch.Tensor
    group: torch.distributed.ProcessGroup | None

    def difference(self, index: int, guess: torch.Tensor) -> torch.Tensor:
        """Return the loss of head ``index``, summed over all rows (a scalar), for its states [s / ranks, 1, h].

        Collective on the tensor-parallel group under sequence parallelism.
        """
        rows = self.rows[:, index]
        target = self.table[rows.clamp_min(0)].float()
        scale = target.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        each = torch.nn.functional.smooth_l1_loss(guess[:, 0].float() / scale, target / scale, reduction="none")
        total: torch.Tensor = (each.mean(-1) * (rows != NO_ROW)).sum()
        if self.group is not None:
            total = reduce_from_tensor_model_parallel_region(total, group=self.group)
        return total


def later_states(
    hidden: torch.Tensor,
    layout: AttentionLayout,
    count: int,
    exchange: Callable[..., Pending],
    group: torch.distributed.ProcessGroup | None,
) -> LaterStates:
    """Fetch the states of the ``count`` tokens after each row. Communicates in rings, and in ``group`` if given.

    Args:
        hidden: input of the model's output layer, [s / ranks, 1, h].
        layout: layout of the micro-batch.
        count: number of heads.
        exchange: method ``exchange`` of the ring communicator.
        group: tensor-parallel ranks that share the sequence; None without sequence parallelism.
    """
    states = hidden.detach()[:, 0]
    where = later_rows(layout, count)
    rows = where.rows.to(states.device)
    if group is not None:
        states = gather_from_sequence_parallel_region(states, group=group)
        rows = rows.chunk(group.size())[group.rank()]
    pending, table = where.start(states, exchange)
    if pending is not None:
        pending.wait()
    return LaterStates(table, rows, group)
