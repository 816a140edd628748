"""Parameters of Megatron's DDP in host memory; the device holds only a window of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.states.node_memory import HostBlocks
from bytescale_ext.states.window import LayerWindow
from megatron.bytescale.core.distributed.param_and_grad_buffer import HostGradients

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


def move_states(
    chunks: Sequence[DistributedDataParallel], config: StateConfig, blocks: HostBlocks, on_cuda: bool
) -> HostGradients:
    """Move gradients (from stage 2 on) and parameters (stage 3) of these DDP modules to host memory.

    Runs before the optimizer is built, so that the optimizer is built on host parameters. Raises ValueError if the
    states do not fit into host memory.
    """
    gradients = HostGradients(chunks, config, blocks, on_cuda)
    if config.stage == 3:
        gradients.windows = [move_parameters(chunk, config, gradients, blocks) for chunk in chunks]
    return gradients


def move_parameters(
    chunk: DistributedDataParallel, config: StateConfig, gradients: HostGradients, blocks: HostBlocks
) -> LayerWindow:
    """Move a DDP module's parameters to host memory; return the window that brings layers to the device.

    Processes that share parameters all write them here, with equal values.
    """
    hosted: set[torch.nn.Parameter] = set()
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        whole = buffer.param_data
        if whole is None or whole not in blocks:
            whole = blocks.allocate(buffer.numel, buffer.param_dtype, buffer.data_parallel_group)
        gradients.host_bytes += blocks.num_bytes(whole)
        config.check_fits(gradients.host_bytes)
        for parameter in buffer.params:
            start, stop, _ = buffer.param_index_map[parameter]
            host = whole[start:stop].view(parameter.shape)
            host.copy_(parameter.data)  # a copy to itself if DDP's buffer began in host memory
            parameter.data = host
            hosted.add(parameter)
        if buffer.param_data is not None:
            buffer.param_data = whole
            for bucket in buffer.buckets:
                bucket.param_data = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
    stacks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    layers = [layer for stack in stacks for layer in stack.layers]
    return LayerWindow(chunk.module, layers, hosted, config.window_layers, gradients.device)
