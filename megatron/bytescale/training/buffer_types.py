"""Restores the dtypes of a model's buffers.

Megatron builds parameters in the dtype of ``--bf16`` or ``--fp16`` and counts in float32. Its wrapper then converts all
tensors, including counts: a bfloat16 count of tokens stops growing at 256 times its increment. So this module restores
the buffers of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Chunks = list[torch.nn.Module]
"""Model chunks of a process."""


class BufferTypes:
    """Records the buffers of new model chunks, and restores buffers whose dtype has changed."""

    def __init__(self) -> None:
        self._built: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def note(self, model_chunks: Chunks) -> Chunks:
        """Hook in ``ModelConfig.pre_wrap_hooks``: record all buffers."""
        self._built = [
            (module, name, buffer)
            for chunk in model_chunks
            for module in chunk.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        return model_chunks

    def restore(self, model_chunks: Chunks) -> Chunks:
        """Hook in ``ModelConfig.post_wrap_hooks``: restore dtypes and values of converted buffers, on their device."""
        for module, name, built in self._built:
            buffer = module.get_buffer(name)
            if buffer.dtype != built.dtype:
                source = buffer if built.is_meta else built
                is_saved = name not in module._non_persistent_buffers_set
                module.register_buffer(name, source.to(buffer.device, built.dtype), persistent=is_saved)
        self._built.clear()
        return model_chunks


def buffers_of(model_chunks: Sequence[torch.nn.Module]) -> dict[str, torch.dtype]:
    """Return "Class.buffer" -> dtype for all buffers."""
    return {
        f"{type(module).__name__}.{name}": buffer.dtype
        for chunk in model_chunks
        for module in chunk.modules()
        for name, buffer in module.named_buffers(recurse=False)
    }
