"""Collectives over tensors in host memory, through chunks of device memory.

Gradients and parameters that are not on the device are reduced and gathered there all the same, where the network is:
a chunk is copied to the device, communicated, and its result is copied back. With sharded results each chunk takes the
same part of every rank's shard, so that shards are those of one collective over the whole tensor:

    shard of     rank 0      rank 1
    whole     |a b c d e f|g h i j k l|
    chunks    |a b|g h|   |c d|i j|   |e f|k l|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Chunks:
    """How tensors in host memory are communicated.

    Attributes:
        group: of the ranks that share them.
        device: of the chunks.
        num_elements: of a chunk, at most; each rank of the group has one at least.
    """

    group: dist.ProcessGroup
    device: torch.device
    num_elements: int

    def reduce(self, whole: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor [n] in host memory by its sum over the ranks of the group, on each of them."""
        if self.group.size() == 1:
            return
        for part in whole.split(self.num_elements):
            chunk = part.to(self.device, copy=True)
            dist.all_reduce(chunk, op=op, group=self.group)
            part.copy_(chunk)

    def reduce_scatter(self, whole: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace this rank's shard of a tensor [ranks * n] in host memory by its sum over the ranks of the group."""
        if self.group.size() == 1:
            return
        for rows in self._parts(whole):
            chunk = rows.to(self.device, copy=True).contiguous()
            result = torch.empty_like(chunk[0])
            dist.reduce_scatter_tensor(result, chunk.view(-1), op=op, group=self.group)
            rows[self.group.rank()].copy_(result)

    def gather(self, whole: torch.Tensor) -> None:
        """Fill a tensor [ranks * n] in host memory with the shards of all ranks; only this rank's must be there."""
        if self.group.size() == 1:
            return
        for rows in self._parts(whole):
            mine = rows[self.group.rank()].to(self.device, copy=True)
            chunk = torch.empty(rows.numel(), dtype=rows.dtype, device=self.device)
            dist.all_gather_into_tensor(chunk, mine, group=self.group)
            rows.copy_(chunk.view(rows.shape))

    def _parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the chunks [ranks, m] of a tensor [ranks * n]; they are views."""
        num_ranks = self.group.size()
        return torch.split(whole.view(num_ranks, -1), max(1, self.num_elements // num_ranks), dim=1)
