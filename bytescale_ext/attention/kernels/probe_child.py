"""The probe of a kernel whose errors may end the process: prints why the kernel is unfit, or nothing.

python -m bytescale_ext.attention.kernels.probe_child NAME DEVICE DTYPE HEAD_DIM VALUE_DIM [windows]
"""

from __future__ import annotations

import sys

import torch

from bytescale_ext.attention.kernels.table import kernel_table, probe_here


def main(name: str, device: str, dtype: str, head_dim: str, value_dim: str, *windows: str) -> None:
    """Probe the kernel of a name. Raises StopIteration if the kernel is unknown."""
    kernel = next(row for row in kernel_table() if row.name == name)
    widths = int(head_dim), int(value_dim)
    why_not = probe_here(kernel, torch.device(device), getattr(torch, dtype), widths, bool(windows))
    print(why_not or "")


if __name__ == "__main__":
    main(*sys.argv[1:])
