"""Recomputation of a layer receives as many bytes from other tensor-parallel ranks as its price counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.tensors import layer_tensors
from bytescale_ext.plan.cost.model_shape import ModelShape
from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks

SHAPE = ModelShape(2, 32, 4, 2, 8, 48, True, 64)
TOKENS = 40
PLANS = {
    "half": ActivationPlan("shares", 0.0, 0.5, 0.0),
    "all": ActivationPlan("shares", 0.0, 1.0, 0.0),
    "cheap alone": ActivationPlan("priced", 0.0, 0.0, 0.0, True),
    "cheap and half": ActivationPlan("priced", 0.0, 0.5, 0.0, True),
}


class Received(TorchDispatchMode):
    """Counts the bytes that a rank receives in collectives."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.others, self.num_bytes = (world - 1) / world, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        whole = {"c10d._allgather_base_": 0, "c10d._reduce_scatter_base_": 1, "c10d.allreduce_": 0}
        for start, index in whole.items():
            if name.startswith(start):
                tensor = args[index][0] if isinstance(args[index], list | tuple) else args[index]
                self.num_bytes += self.others * tensor.nbytes * (2 if "allreduce" in name else 1)
        assert not name.startswith("c10d.") or name.startswith(tuple(whole)), name
        return func(*args, **(kwargs or {}))


def count(rank: int, world: int, sequence_parallel: bool) -> dict[str, float]:
    """Return the bytes received while the layers of a step are recomputed, by plan."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from functools import partial

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    from bytescale_ext.activation.arena import allocate_arena
    from bytescale_ext.activation.link import make_link
    from bytescale_ext.activation.store import ActivationStore
    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.core.transformer import transformer_layer
    from megatron.bytescale.core.transformer.dot_product_attention import SampleAttention
    from megatron.bytescale.core.transformer.norm import LocalNorm

    parallel_state.initialize_model_parallel(world)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False, normalization="RMSNorm",
        tensor_model_parallel_size=world, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    store = ActivationStore(PLANS["all"], make_link(allocate_arena(0, pinned=False), on_cuda=False), 2)
    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    kernel = choose_kernel(torch.device("cpu"), torch.float32, 8)[0]
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LocalNorm
    spec.submodules.self_attention.submodules.core_attention = partial(
        SampleAttention, runtime=runtime_of(kernel=kernel)
    )
    block = TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=LocalNorm)
    decoder = TransformerBlock(config, transformer_layer.planned_layer_spec(block, store)).train()
    total, rebuild = Received(world), transformer_layer.PlannedTransformerLayer._rebuild

    def counted(*args: Any) -> None:
        with total:
            rebuild(*args)

    transformer_layer.PlannedTransformerLayer._rebuild = counted
    rows = TOKENS // world if sequence_parallel else TOKENS
    found = {}
    for name, plan in PLANS.items():
        store.plan, total.num_bytes = plan, 0.0
        decoder(torch.randn(rows, 1, 32, requires_grad=True), None).sum().backward()
        store.check_empty()
        found[name] = total.num_bytes
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rebuilding_receives_what_its_price_counts(sequence_parallel: bool) -> None:
    tensors = layer_tensors(SHAPE, 4, tensor_parallel=2, sequence_parallel=sequence_parallel)
    for found in run_ranks(count, 2, sequence_parallel):
        for name, plan in PLANS.items():
            shares = [(plan.shares(tensor)[2], tensor.received_bytes_per_token) for tensor in tensors]
            expected = SHAPE.num_layers * TOKENS * sum(share * received for share, received in shares)
            assert found[name] == expected, name
