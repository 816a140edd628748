"""Collectives over tensors in host memory, through chunks on the device.

Gradients and parameters in host memory use the device's network: each chunk is copied to the device and communicated,
and its result is copied back. For sharded results a chunk takes the same part of every rank's shard, so that the shards
equal the shards of one collective over the whole tensor:

    shard of     rank 0      rank 1
    whole     |a b c d e f|g h i j k l|
    chunks    |a b|g h|   |c d|i j|   |e f|k l|

If the processes of a node share the tensor, it has the sum over them already. Each process then contributes its own
part of a chunk and zeros, and writes only what belongs to it. Before and after a collective they need a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from bytescale_ext.states.node_memory import NodeRanks


@dataclass(frozen=True)
class ChunkedCollectives:
    """Collectives over tensors in host memory.

    Attributes:
        group: ranks that communicate.
        device: device of the chunks.
        num_elements: largest number of elements of a chunk. A chunk has at least one element per rank.
        node: the ranks that share the tensors; None: each rank has its own.
    """

    group: dist.ProcessGroup
    device: torch.device
    num_elements: int
    node: NodeRanks | None = None

    def reduce(self, whole: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor [n] in host memory by its sum over the ranks of the group, on every rank.

        Shared tensors can only be summed and averaged.
        """
        if self.group.size() == 1:
            return
        for part in whole.split(self.num_elements):
            chunk = self._contribution(part)
            dist.all_reduce(chunk, op=op, group=self.group)
            own = slice(None) if self.node is None else self.node.own(part.numel())
            part[own].copy_(chunk[own])

    def reduce_scatter(self, whole: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace this rank's shard of a tensor [ranks * n] in host memory by the sum of the shard over all ranks."""
        if self.group.size() == 1:
            return
        for rows in self._parts(whole):
            chunk = self._contribution(rows)
            result = torch.empty_like(chunk[0])
            dist.reduce_scatter_tensor(result, chunk.view(-1), op=op, group=self.group)
            rows[self.group.rank()].copy_(result)

    def gather(self, whole: torch.Tensor) -> None:
        """Fill a tensor [ranks * n] in host memory with the shards of all ranks. This rank's shard is the input."""
        if self.group.size() == 1:
            return
        for rows in self._parts(whole):
            shard = rows[self.group.rank()].to(self.device, copy=True)
            chunk = torch.empty(rows.numel(), dtype=rows.dtype, device=self.device)
            dist.all_gather_into_tensor(chunk, shard, group=self.group)
            self._store(rows, chunk.view(rows.shape))

    def _contribution(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand on the device, [..., m]: its part, or its own columns of the part and zeros."""
        if self.node is None:
            return part.to(self.device, copy=True).contiguous()
        own = self.node.own(part.shape[-1])
        chunk = torch.zeros(part.shape, dtype=part.dtype, device=self.device)
        chunk[..., own] = part[..., own].to(self.device)
        return chunk

    def _store(self, rows: torch.Tensor, gathered: torch.Tensor) -> None:
        """Copy gathered rows [ranks, m] to host memory; processes of a node share the rows of other nodes."""
        if self.node is None:
            rows.copy_(gathered)
            return
        others = [rank for rank in range(self.group.size()) if rank not in self.node.ranks]
        for rank in others[self.node.position :: len(self.node.ranks)]:
            rows[rank].copy_(gathered[rank])

    def _parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the chunks [ranks, m] of a tensor [ranks * n], as views."""
        num_ranks = self.group.size()
        return torch.split(whole.view(num_ranks, -1), max(1, self.num_elements // num_ranks), dim=1)
