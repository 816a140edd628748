"""Parts of Megatron's start that are left out."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.bytescale.training.initialize import (
    own_process_groups,
    use_gpu,
    wrap_compile_helpers,
    wrap_set_jit_fusion_options,
)


def test_the_dataset_helper_is_compiled_only_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    wrapped = wrap_compile_helpers(lambda: calls.append("make"), None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wrapped()
    assert calls == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wrapped()
    assert calls == ["make"]


def test_fused_kernels_are_not_warmed_up() -> None:
    def original(**options: Any) -> None:
        raise AssertionError(f"warmed up with {options}")

    wrap_set_jit_fusion_options(original, None)(tp_size=2)


def test_each_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    use_gpu(1)
    assert taken == [1]
    with pytest.raises(ValueError, match=r"^local rank 2 needs a GPU of its own, but torch sees 2: start fewer ranks$"):
        use_gpu(2)


def join_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run_and_exit(code: int | None) -> None:
    with own_process_groups():
        join_alone()
        sys.exit(code)


@pytest.mark.parametrize("code", [None, 0, 1])
def test_groups_of_a_run_end_with_it_unless_it_fails(code: int | None) -> None:
    with pytest.raises(SystemExit):
        run_and_exit(code)
    try:
        assert dist.is_initialized() is (code == 1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_groups_of_others_stay() -> None:
    join_alone()
    try:
        with own_process_groups():
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
