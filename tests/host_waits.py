"""Fake CUDA device that records waits. Tensors have real shapes and devices, but no values.

    with FakeGpu() as gpu:
        run(torch.empty(3, device="cuda"))
    assert gpu.waits == []

Torch's fake tensors simulate the device. A wait is an operation that stops the host until the device has finished:
reading a value, a shape that depends on values, or a copy between device and pageable memory. Autograd's engine needs a
real device, so backward passes are called directly.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("aten::_to_copy", "aten::copy_")
# Operators with a result or shape that the host needs.
READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
)


class PinnedMemory(TorchFunctionMode):
    """Records the tensors that a program locks in memory, because there is no driver to lock them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, without ``pin_memory``."""
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False) or func is torch.Tensor.pin_memory
        if func is torch.Tensor.is_pinned:
            return getattr(args[0], "is_page_locked", False)
        result = args[0].clone() if func is torch.Tensor.pin_memory else func(*args, **kwargs)
        if is_pinned:
            result.is_page_locked = True
        return result


class NotedWaits(TorchDispatchMode):
    """Records each operator that makes the host wait for the device, with the calling line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record ``func`` if it waits, and run it."""
        name, kwargs = func._schema.name, dict(kwargs or {})
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        on_device = [tensor.is_cuda for tensor in tensors]
        if name in COPIES and _waits(name, args, kwargs):
            self._note(f"{name} of {tuple(tensors[-1].shape)} between device and pageable memory")
        elif name in READS and any(on_device):
            self._note(name)
        elif name == "aten::index" and any(tensor.is_cuda and tensor.dtype == torch.bool for tensor in tensors[1:]):
            self._note(f"{name} by a mask")
        elif name == "aten::repeat_interleave" and any(on_device) and kwargs.get("output_size") is None:
            self._note(f"{name} without its size")
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        ours = [one for one in traceback.extract_stack() if "/torch/" not in one.filename and one.filename != __file__]
        self.found.append(f"{what} at {', '.join(f'{one.filename}:{one.lineno}' for one in ours[-2:])}")


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy makes the host wait: a blocking copy, or a copy between device and pageable memory."""
    source = args[1] if name == "aten::copy_" else args[0]
    target = args[0] if name == "aten::copy_" else None
    to_cuda = (
        target.is_cuda if target is not None else torch.device(kwargs.get("device") or source.device).type == "cuda"
    )
    if source.is_cuda == to_cuda:
        return False
    in_background = bool(kwargs.get("non_blocking")) or (name == "aten::copy_" and args[2:3] == (True,))
    host = source if to_cuda else target
    return not (in_background and host is not None and getattr(host, "is_page_locked", False))


class FakeGpu(AbstractContextManager["FakeGpu"]):
    """Context that turns all new tensors into fake tensors, even on "cuda". ``waits`` lists the waits of the host."""

    def __init__(self) -> None:
        self._noted = NotedWaits()
        self._stack = ExitStack()

    @property
    def waits(self) -> list[str]:
        """Return each wait so far, with the lines that caused it."""
        return self._noted.found

    def __enter__(self) -> FakeGpu:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), PinnedMemory(), self._noted):
            self._stack.enter_context(mode)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def waits_of(run: Callable[[], object]) -> list[str]:
    """Return the waits of a function that creates its own tensors."""
    with FakeGpu() as gpu:
        run()
    return gpu.waits
