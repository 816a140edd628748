"""Collectives over tensors in host memory, through chunks on the device.

Gradients and parameters in host memory use the device's network: each chunk is copied to the device and communicated,
and its result is copied back. For sharded results a chunk takes the same part of every rank's shard, so that the shards
equal the shards of one collective over the whole tensor:

    shard of     rank 0      rank 1
    whole     |a b c d e f|g h i j k l|
    chunks    |a b|g h|   |c d|i j|   |e f|k l|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ChunkedCollectives:
    """Collectives over tensors in host memory.

    Attributes:
        group: ranks that communicate.
        device: device of the chunks.
        num_elements: largest number of elements of a chunk. A chunk has at least one element per rank.
    """

    group: dist.ProcessGroup
    device: torch.device
    num_elements: int

    def reduce(self, whole: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor [n] in host memory by its sum over the ranks of the group, on every rank."""
        if self.group.size() == 1:
            return
        for part in whole.split(self.num_elements):
            chunk = part.to(self.device, copy=True)
            dist.all_reduce(chunk, op=op, group=self.group)
            part.copy_(chunk)

    def reduce_scatter(self, whole: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace this rank's shard of a tensor [ranks * n] in host memory by the sum of the shard over all ranks."""
        if self.group.size() == 1:
            return
        for rows in self._parts(whole):
            chunk = rows.to(self.device, copy=True).contiguous()
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
            rows.copy_(chunk.view(rows.shape))

    def _parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the chunks [ranks, m] of a tensor [ranks * n], as views."""
        num_ranks = self.group.size()
        return torch.split(whole.view(num_ranks, -1), max(1, self.num_elements // num_ranks), dim=1)
