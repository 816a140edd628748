"""Builds model states directly in host memory: DDP's buffers and the optimizer's float32 copies.

Megatron's DDP allocates its gradient and parameter buffers with ``torch.zeros`` on the device. Its optimizers copy
parameters to float32 with ``Tensor.float``, and raise TypeError unless ``Tensor.type`` names a CUDA type. During the
build, torch function modes redirect these three calls. Otherwise the build would need 8 bytes of device memory per
bf16 parameter, which would limit the models that stages 2 and 3 make room for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from bytescale_ext.config.memory.states import StateConfig

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime


class BuffersInHostMemory(TorchFunctionMode):
    """Allocates DDP's buffers in host memory. It recognizes them as zeros [n] created with ``requires_grad=False``.

    Attributes:
        left_out: dtype of buffers that stay on the device, or None.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype], torch.Tensor], left_out: torch.dtype | None) -> None:
        """``allocate`` returns zeros [n] of a type in host memory."""
        super().__init__()
        self.left_out, self._allocate = left_out, allocate

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """See ``TorchFunctionMode``."""
        named = kwargs or {}
        is_buffer = func is torch.zeros and named.get("requires_grad") is False and named.keys() >= {"dtype", "device"}
        if is_buffer and len(args) == 1 and isinstance(args[0], int) and named["dtype"] is not self.left_out:
            return self._allocate(args[0], named["dtype"])
        return func(*args, **named)


class CopiesInHostMemory(TorchFunctionMode):
    """Places float32 copies of tensors in host memory, and names the types of tensors there as if on a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """See ``TorchFunctionMode``."""
        if func is torch.Tensor.float:
            return func(args[0].to("cpu"), *args[1:], **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, str) and func is torch.Tensor.type and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def wrap_param_and_grad_buffer(original: Callable[..., None], runtime: Runtime) -> Callable[..., None]:
    """Let a buffer of DDP begin in host memory if the stage of the paged states keeps it there.

    In stage 2 this is the gradient buffer, provided that its dtype differs from the parameters' dtype. Otherwise
    ``move_states`` moves it after the build.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def begin(*args: object, **kwargs: object) -> None:
        blocks, config = runtime.parts.host_blocks, runtime.run.find(StateConfig)
        if blocks is None or config is None:
            original(*args, **kwargs)
            return
        group = signature.bind(*args, **kwargs).arguments["data_parallel_group"]
        left_out = None if config.stage == 3 else runtime.run.process.dtype
        with BuffersInHostMemory(functools.partial(blocks.allocate, group=group), left_out):
            original(*args, **kwargs)

    return begin
