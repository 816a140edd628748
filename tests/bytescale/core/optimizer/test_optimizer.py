"""Megatron's optimizer with pages steps as it does without. Whole runs are in tests/e2e/states."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from bytescale_ext.config.memory.states import StateConfig
from megatron.bytescale.core.optimizer.optimizer import PAGED, owners_of, page_parts

AMPLE = StateConfig(4096, math.inf)
CONFIG = SimpleNamespace(timers=None, reuse_grad_buf_for_mxfp8_param_ag=False)
SIZES = ((3000,), (5, 7))


def part_of(kind: type, **settings: Any) -> Any:
    """Return a part of Megatron's optimizer without its constructor, which needs process groups."""
    part = object.__new__(kind)
    vars(part).update(is_stub_optimizer=False, config=CONFIG, grad_scaler=None, _dummy_overflow_buf=None, **settings)
    return part


def float16_part() -> Any:
    """Return a part with two 16-bit parameters, one without weight decay, and their gradients."""
    torch.manual_seed(3)
    model = [torch.randn(size, dtype=torch.bfloat16) for size in SIZES]
    for parameter in model:
        parameter.main_grad = torch.randn(parameter.shape)  # type: ignore[attr-defined]
    main = [parameter.clone().float() for parameter in model]
    groups = [{"params": [main[0]]}, {"params": [main[1]], "weight_decay": 0.0}]
    settings = {
        "optimizer": torch.optim.AdamW(groups, lr=0.1),
        "float16_groups": [[model[0]], [model[1]]],
        "fp32_from_float16_groups": [[main[0]], [main[1]]],
        "fp32_from_fp32_groups": [[], []],
    }
    return part_of(Float16OptimizerWithFloat16Params, **settings)


def test_a_paged_part_steps_as_megatrons() -> None:
    paged, resident = float16_part(), float16_part()
    page_parts([paged], AMPLE, on_cuda=False)
    assert type(paged) is PAGED[Float16OptimizerWithFloat16Params]
    for _ in range(3):
        for part in (paged, resident):
            part.prepare_grads()
            part.step_with_ready_grads()
        for groups in ("float16_groups", "fp32_from_float16_groups"):
            found, expected = ([one for group in vars(part)[groups] for one in group] for part in (paged, resident))
            assert all(map(torch.equal, found, expected))
    assert len(paged.paged_adam.table.pages) == 4


def test_float32_parameters_get_their_own_results() -> None:
    parameters = [torch.randn(size, requires_grad=True) for size in SIZES]
    part = part_of(FP32Optimizer, optimizer=torch.optim.AdamW(parameters))
    owners = owners_of(part)
    assert [owner.has_copy for owner in owners] == [False, False]
    assert [owner.target.data_ptr() for owner in owners] == [parameter.data_ptr() for parameter in parameters]
    page_parts([part], AMPLE, on_cuda=False)
    assert type(part) is FP32Optimizer


def test_a_shard_returns_to_the_models_parameter() -> None:
    """Float32 shards come first in Megatron's groups, before copies of 16-bit shards."""
    model = [torch.randn(10, dtype=torch.bfloat16), torch.randn(6)]
    shards = [model[0][2:8], model[1][:3]]
    copy = shards[0].clone().float()
    part = part_of(
        DistributedOptimizer, optimizer=torch.optim.AdamW([shards[1], copy]),
        shard_float16_groups=[[shards[0]]], shard_fp32_from_float16_groups=[[copy]],
    )  # fmt: skip
    single, half = owners_of(part)
    assert (single.has_copy, half.has_copy) == (False, True)
    assert single.target.data_ptr() == shards[1].data_ptr()
    assert half.target.data_ptr() == shards[0].data_ptr()


def test_parts_share_the_budget_and_empty_ones_have_no_pages() -> None:
    empty = part_of(Float16OptimizerWithFloat16Params, optimizer=None)
    empty.is_stub_optimizer = True
    bytes_of_one = (4 * 3 + 4) * 4096
    parts = [float16_part(), empty, float16_part()]
    with pytest.raises(ValueError, match="raise --state-host-gb"):
        page_parts(parts, StateConfig(4096, 2 * bytes_of_one - 1), on_cuda=False)
    parts = [float16_part(), empty, float16_part()]
    page_parts(parts, StateConfig(4096, 2 * bytes_of_one), on_cuda=False)
    assert type(empty) is Float16OptimizerWithFloat16Params
    assert not hasattr(empty, "paged_adam")
