"""Relative errors of tensors."""

from __future__ import annotations

import torch


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
