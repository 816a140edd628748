"""Megatron's optimizer with pages equals the optimizer without. tests/e2e/states tests whole runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from bytescale_ext.config.memory.states import NvmeConfig, StateConfig
from bytescale_ext.plan.states.tiers import least_host_bytes
from megatron.bytescale.core.optimizer.optimizer import page_parts, paged, paged_parameters

AMPLE = StateConfig(4096, math.inf)
CONFIG = SimpleNamespace(timers=None, reuse_grad_buf_for_mxfp8_param_ag=False)
SIZES = ((3000,), (5, 7))
LARGE = ((30000,), (5, 7))


def part_of(kind: type, **settings: Any) -> Any:
    """Return a part of Megatron's optimizer without its constructor, which needs process groups."""
    part = object.__new__(kind)
    vars(part).update(is_stub_optimizer=False, config=CONFIG, grad_scaler=None, _dummy_overflow_buf=None, **settings)
    return part


def float16_part(sizes: Sequence[tuple[int, ...]] = SIZES) -> Any:
    """Return a part with two 16-bit parameters, one without weight decay, and their gradients."""
    torch.manual_seed(3)
    model = [torch.randn(size, dtype=torch.bfloat16) for size in sizes]
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
    in_pages, resident = float16_part(), float16_part()
    page_parts([in_pages], AMPLE, on_cuda=False)
    assert type(in_pages) is paged(Float16OptimizerWithFloat16Params)
    for _ in range(3):
        for part in (in_pages, resident):
            part.prepare_grads()
            part.step_with_ready_grads()
        for groups in ("float16_groups", "fp32_from_float16_groups"):
            found, expected = ([one for group in vars(part)[groups] for one in group] for part in (in_pages, resident))
            assert all(map(torch.equal, found, expected))
    assert len(in_pages.paged_adam.table.pages) == 4


def test_a_shard_returns_to_the_models_parameter() -> None:
    """Float32 shards come first in Megatron's groups, before copies of 16-bit shards."""
    model = [torch.randn(10, dtype=torch.bfloat16), torch.randn(6)]
    shards = [model[0][2:8], model[1][:3]]
    copy = shards[0].clone().float()
    part = part_of(
        DistributedOptimizer, optimizer=torch.optim.AdamW([shards[1], copy]),
        shard_float16_groups=[[shards[0]]], shard_fp32_from_float16_groups=[[copy]],
    )  # fmt: skip
    single, half = paged_parameters(part)
    assert (single.has_copy, half.has_copy) == (False, True)
    assert single.target.data_ptr() == shards[1].data_ptr()
    assert half.target.data_ptr() == shards[0].data_ptr()


def with_disk(folder: Path, num_pages: int) -> StateConfig:
    return StateConfig(4096, num_pages * 4096 + least_host_bytes(4096, True), NvmeConfig(folder, 1e9, rank=7))


def test_pages_on_a_disk_step_as_megatrons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paged, resident = float16_part(LARGE), float16_part(LARGE)
    page_parts([paged], with_disk(tmp_path, 8), on_cuda=False)
    [path] = tmp_path.iterdir()
    assert path.name == "rank-00007-part-0.pages"
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"> bytescale: 29 of 31 pages in {path}, a file of 0.001 GB; 0.000 GB read and written a step"
    )
    for _ in range(3):
        for part in (paged, resident):
            part.prepare_grads()
            part.step_with_ready_grads()
    found, expected = ([one for group in part.float16_groups for one in group] for part in (paged, resident))
    assert all(map(torch.equal, found, expected))
    states = paged.state_dict()["fp32_from_fp16_params"]
    assert all(
        map(torch.equal, states[0] + states[1], [one for group in resident.fp32_from_float16_groups for one in group])
    )


def test_parameters_of_a_checkpoint_without_optimizer_reach_the_disk(tmp_path: Path) -> None:
    part = float16_part(LARGE)
    page_parts([part], with_disk(tmp_path, 0), on_cuda=False)
    part.prepare_grads()
    part.step_with_ready_grads()
    for group in part.float16_groups:
        for parameter in group:
            parameter.data.fill_(3.0)
    part._copy_model_params_to_main_params()
    part.prepare_grads()
    part.optimizer.param_groups[0]["lr"] = part.optimizer.param_groups[1]["lr"] = 0.0
    part.step_with_ready_grads()
    assert all(torch.all(parameter == 3.0) for group in part.float16_groups for parameter in group)
    part.optimizer.state_dict()
    assert all(torch.all(one == 3.0) for group in part.fp32_from_float16_groups for one in group)


def test_states_are_lent_before_megatron_saves_them_by_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = float16_part(LARGE)
    page_parts([part], with_disk(tmp_path, 0), on_cuda=False)
    part.prepare_grads()
    part.step_with_ready_grads()
    seen = []

    def save(self: Any, filename: str) -> None:
        main = self.fp32_from_float16_groups[0][0]
        seen.append((filename, bool(main.isfinite().all()), self.optimizer.state[main]["exp_avg"].is_meta))

    monkeypatch.setattr(Float16OptimizerWithFloat16Params, "save_parameter_state", save, raising=False)
    part.save_parameter_state("file")
    assert seen == [("file", True, False)]
