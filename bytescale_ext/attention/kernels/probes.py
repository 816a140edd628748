"""What choices of kernels share: whether Triton can run, and the text of a failed probe."""

from __future__ import annotations

import importlib.util

import torch


def why_not_triton(device: torch.device) -> str | None:
    """Return why kernels of Triton do not run on a device, or None. Looks for the package, does not import it."""
    if device.type != "cuda":
        return f"it runs on cuda, not on {device.type}"
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def failure(error: Exception) -> str:
    """Return the reason against a kernel whose probe raised an error. Packages and compilers fail in their own ways."""
    return f"its probe failed: {type(error).__name__}: {str(error)[:200]}"
