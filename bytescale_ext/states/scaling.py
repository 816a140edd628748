"""Scaling of rows of a weight in place, also of a part of the weight that begins and ends inside of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowFactors:
    """A factor for each row of a weight.

    Attributes:
        factors: ``[rows]``, float32.
        row_size: elements of a row.
    """

    factors: torch.Tensor
    row_size: int

    def on(self, device: torch.device) -> RowFactors:
        """Return the factors on a device. The host waits if they move from a GPU to host memory."""
        return RowFactors(self.factors.to(device), self.row_size)

    def scale_(self, part: torch.Tensor, start: int) -> None:
        """Scale ``part [n]`` by the factors of its rows: elements ``start`` to ``start + n`` of the flattened weight.

        The factors are on the device of ``part``.
        """
        stop, size = start + part.numel(), self.row_size
        first, last = -(-start // size), stop // size  # whole rows
        if first > last:  # inside of one row
            part.mul_(self.factors[last])
            return
        head, tail = first * size - start, stop - last * size
        if head:
            part[:head].mul_(self.factors[first - 1])
        if last > first:
            whole = part[head : part.numel() - tail].view(last - first, size)
            whole.mul_(self.factors[first:last, None])
        if tail:
            part[part.numel() - tail :].mul_(self.factors[last])
