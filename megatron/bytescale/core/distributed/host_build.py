"""Builds model states directly in host memory: DDP's buffers and the optimizer's float32 copies.

Megatron's DDP allocates its gradient and parameter buffers with ``torch.zeros`` on the device. Its optimizers copy
parameters to float32 with ``Tensor.float``, and raise TypeError unless ``Tensor.type`` names a CUDA type. During the
build, torch function modes redirect these three calls. Otherwise the build would need 8 bytes of device memory per
bf16 parameter, which would limit the models that stages 2 and 3 make room for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.states.gradients import host_block

if TYPE_CHECKING:
    from megatron.training.models.gpt import GPTModelConfig


class BuffersInHostMemory(TorchFunctionMode):
    """Allocates DDP's buffers in host memory. It recognizes them as zeros [n] created with ``requires_grad=False``.

    Attributes:
        left_out: dtype of buffers that stay on the device, or None.
    """

    def __init__(self, pinned: bool, left_out: torch.dtype | None) -> None:
        super().__init__()
        self.left_out, self._pinned = left_out, pinned

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
            block = host_block(args[0], named["dtype"], self._pinned)
            block.began_in_host_memory = True  # type: ignore[attr-defined]
            return block
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


def add_hooks(model: GPTModelConfig, config: StateConfig, run: RunConfig) -> None:
    """Let DDP allocate the buffers that the stage of ``config`` keeps in host memory there.

    In stage 2 these are gradient buffers, provided that their dtype differs from the parameters' dtype. Otherwise
    ``move_states`` moves them after the build.
    """
    if config.stage == 1:
        return
    mode = BuffersInHostMemory(run.process.on_cuda, None if config.stage == 3 else run.process.dtype)

    def begin(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        mode.__enter__()
        return chunks

    def end(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        mode.__exit__(None, None, None)
        return chunks

    model.pre_wrap_hooks.append(begin)
    model.post_wrap_hooks.insert(0, end)
