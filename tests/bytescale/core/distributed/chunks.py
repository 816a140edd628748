"""Parts of a model in Megatron's DDP, without process groups of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

WIDTH = 4
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype))
        self.q_layernorm = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.q_layernorm * torch.tanh(hidden @ self.weight)


class Model(nn.Module):
    """Model with an embedding, three layers in a Megatron block, and no output layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Parameter(torch.randn(6, WIDTH, dtype=dtype))
        self.embedding.shared_embedding = True  # type: ignore[attr-defined]
        self.decoder = TransformerBlock.__new__(TransformerBlock)
        nn.Module.__init__(self.decoder)
        self.decoder.layers = nn.ModuleList(Layer(dtype) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding[tokens]
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return hidden.float().square().sum()


def chunk_of(dtype: torch.dtype = torch.bfloat16, shares: bool = True, factor: float = 1.0) -> Any:
    """Return a DDP of one rank: one buffer of two buckets, with parameters in it if ranks share the optimizer."""
    model = Model(dtype)
    buffer, group = object.__new__(_ParamAndGradBuffer), object.__new__(_ParamAndGradBucketGroup)
    parameters = list(model.parameters())[::-1]
    places, start = {}, 0
    for parameter in parameters:
        places[parameter] = (start, start + parameter.numel(), 0)
        start += parameter.numel()
    data = torch.zeros(start, dtype=dtype) if shares else None
    sums, cut = torch.zeros(start), places[parameters[3]][1]
    buckets = [
        SimpleNamespace(
            offset=first,
            grad_data=sums[first:last],
            param_data=None if data is None else data[first:last],
            gradient_scaling_factor=factor,
        )
        for first, last in ((0, cut), (cut, start))
    ]
    vars(buffer).update(numel=start, grad_dtype=torch.float32, param_dtype=dtype, buckets=buckets, params=parameters,
                        param_index_map=places, grad_data=sums, param_data=data, extra_main_grads=[],
                        data_parallel_group=ALONE)  # fmt: skip
    for parameter in parameters:
        first, last, _ = places[parameter]
        parameter.main_grad = sums[first:last].view(parameter.shape)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    config = SimpleNamespace(check_for_nan_in_grad=False, check_for_large_grads=False, average_in_collective=False,
                             use_distributed_optimizer=shares)  # fmt: skip
    vars(group).update(buckets=buckets, params=set(parameters), ddp_config=config, data_parallel_group=ALONE,
                       intra_distributed_optimizer_instance_group=ALONE)  # fmt: skip
    chunk = nn.Module()
    chunk.module = model
    vars(chunk).update(buffers=[buffer], expert_parallel_buffers=[], bucket_groups=[group],
                       expert_parallel_bucket_groups=[])  # fmt: skip
    return chunk
