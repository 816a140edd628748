"""No forward pass in training makes the host wait for the device: on a fake device, with Megatron's own layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.table import kernel_table
from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.attention.virtual import mailbox_comms
from bytescale_ext.data.samples.units import units_of
from bytescale_ext.measure.metrics import StepClock
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing
from tests.attention.cases import GROUPS, TINY, Case, kernel_named, run_round
from tests.bytescale.runtimes import runtime_of
from tests.config.runs import run_of
from tests.data.sources import MemorySource
from tests.harness import run_ranks
from tests.host_waits import FakeGpu, waits_of
from tests.plan.simple_plans import plan_naive
from tests.sample import sampled

LENGTHS = (40, 7, 12, 3)
WAYS: dict[str, tuple[SliceRule | None, int | None]] = {
    "whole": (None, None),
    "loss in chunks": (None, 16),
    "slices": (SliceRule(Slicing(3)), None),
}
CUDA_KERNELS = [row.name for row in kernel_table() if "cuda" in row.devices]
RINGS = [("torch_flash", GROUPS), ("reference", TINY)]  # torch knows the shapes of their results without a device


def host(*values: int, pinned: bool = False) -> torch.Tensor:
    return torch.tensor(values, pin_memory=pinned)


def device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("run", "wait"),
    [
        (lambda: host(1, 2).to("cuda"), "pageable"),
        (lambda: host(1, 2).to("cuda", non_blocking=True), "pageable"),
        (lambda: host(1, 2, pinned=True).to("cuda"), "pageable"),
        (lambda: host(1, 2).cuda(), "pageable"),
        (lambda: torch.tensor([1, 2], device="cuda"), "pageable"),
        (lambda: device(2).cpu(), "pageable"),
        (lambda: device(2).copy_(torch.empty(2)), "pageable"),
        (lambda: device(2)[device(2, dtype=torch.bool)], "mask"),
        (lambda: torch.repeat_interleave(device(2), device(2, dtype=torch.int64)), "without its size"),
        (lambda: device(2).nonzero(), "nonzero"),
        (lambda: device(1).item(), "_local_scalar_dense"),
        (lambda: device(2).tolist(), "_local_scalar_dense"),
        (lambda: bool(device(2).isnan().any()), "_local_scalar_dense"),
    ],
)
def test_waits_are_noted(run: Callable[[], object], wait: str) -> None:
    with FakeGpu() as gpu, contextlib.suppress(RuntimeError):  # a fake tensor has no value to read
        run()
    assert wait in gpu.waits[0]
    assert "test_host_waits.py" in gpu.waits[0]


@pytest.mark.parametrize(
    "run",
    [
        lambda: host(1, 2, pinned=True).to("cuda", non_blocking=True),
        lambda: host(1, 2).pin_memory().to("cuda", non_blocking=True),
        lambda: device(2).copy_(torch.empty(2, pin_memory=True), non_blocking=True),
        lambda: device(2).to(torch.bfloat16).add_(1).clone(),
        lambda: device(2).index_select(0, device(2, dtype=torch.int64)),
        lambda: CuSeqlens((0, 3)).on(torch.device("cuda")),
        lambda: Rows(((0, 2), (3, 4))).take(device(4)),
    ],
)
def test_other_work_is_not_noted(run: Callable[[], object]) -> None:
    assert waits_of(run) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), sampled(RINGS, RINGS[:1]), ids=str)
def test_rings_do_not_wait(name: str, case: Case) -> None:
    """Run forward and backward passes of rings and packs with new rows and offsets on the device."""
    assert name in CUDA_KERNELS
    ranks = range(case.num_ranks)
    with FakeGpu() as gpu:
        for number in range(len(case.rounds)):
            layouts = [case.layout(number, rank) for rank in ranks]
            inputs = [
                [device(layout.num_rows, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
                for layout in layouts
            ]
            backends = [Backend(comm, kernel_named(name), case.scale) for comm in mailbox_comms(case.num_ranks)]
            results = run_round(layouts, inputs, backends)
        assert results[0][0].is_cuda
    assert gpu.waits == []


def build_model(runtime: Any) -> torch.nn.Module:
    """Return a GPT of Megatron's local layers with our attention and positions, on the fake device."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
    from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=128,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, bf16=True,
        perform_initialization=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
    )  # fmt: skip
    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = partial(DocumentAttention, runtime=runtime)
    with torch.device("cuda"):
        model = GPTModel(
            config, spec, 256, 1 << 21, position_embedding_type="rope", share_embeddings_and_output_weights=False
        )
    use_document_positions([model])
    return model.train()


def run_forwards(rank: int, world: int) -> dict[str, tuple[list[str], int]]:
    """Return the host waits of a step's forward passes after a first step, and the number of passes, by mode."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training import training
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.bytescale.arguments.running import LossChecks
    from megatron.bytescale.core.models.gpt.chunked_loss import use_chunked_loss
    from megatron.bytescale.features.hdp import build as hdp
    from tests.e2e.preload import STAND_INS

    if STAND_INS is not None:  # a rank starts with these, which treat the device as the host
        STAND_INS.uninstall()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    hdp.current = lambda kind: LossChecks(check_for_nan_in_loss_and_grad=False)  # type: ignore[attr-defined]
    # A check for NaN reads the loss of each micro-batch, here as in stock Megatron.
    run = run_of()
    on_cuda = replace(run, process=replace(run.process, on_cuda=True))
    runtime = runtime_of(run=on_cuda, clock=StepClock(False), kernel=kernel_named("torch_flash"))
    plan = plan_naive(LENGTHS, 1, 80)
    found = {}
    for name, (rule, loss_tokens) in WAYS.items():
        with FakeGpu() as gpu:
            training._seqlen_stats_in_iteration = device(2, dtype=torch.float64)  # Megatron's count of a step's FLOPs
            model, forward = build_model(runtime), hdp.forward_step(runtime)
            if loss_tokens is not None:
                use_chunked_loss(loss_tokens, [model])
            for _ in range(2):  # Megatron moves its frequencies in the first step
                gpu.waits.clear()
                units = units_of(plan.ranks[0], LENGTHS, 0, 1, rule)
                prefix = None if rule is None else MicroBatchPrefix()
                for number, unit in enumerate(units):
                    packed = unit.read(MemorySource(LENGTHS), range(len(LENGTHS)), LENGTHS)
                    output, loss = forward(iter([(number, packed, prefix)]), model)
                    loss(output)
            found[name] = gpu.waits, len(units)
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_training_forwards_do_not_wait() -> None:
    """Everything from packed tokens to the loss: layouts, positions, rotary angles, attention, FLOP count."""
    found = run_ranks(run_forwards, 1, init_group=False)[0]
    assert {name: number for name, (_, number) in found.items()} == {"whole": 1, "loss in chunks": 1, "slices": 3}
    for name, (waits, _) in found.items():
        assert waits == [], name
