"""Refusals of hybrid data parallelism, by conditions on several arguments."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.bytescale.arguments.refusals import Refusal
from megatron.bytescale.features.hdp.refusals import REFUSALS


def by_flag(flag: str) -> Refusal:
    (row,) = (row for row in REFUSALS if row.flag == flag)
    return row


def test_rows_are_of_this_feature() -> None:
    assert {name for row in REFUSALS for name in row.instead} == {"hdp", "slices"}


@pytest.mark.parametrize(("size", "is_refused"), [(None, False), (4, False), (3, True)])
def test_groups_of_virtual_stages(size: int | None, is_refused: bool) -> None:
    args = Namespace(microbatch_group_size_per_vp_stage=size, pipeline_model_parallel_size=4)
    assert by_flag("--microbatch-group-size-per-virtual-pipeline-stage").applies(args) is is_refused


@pytest.mark.parametrize(("experts", "ranks", "is_refused"), [(None, 2, False), (4, 1, False), (4, 2, True)])
def test_all_gathers_of_experts(experts: int | None, ranks: int, is_refused: bool) -> None:
    args = Namespace(
        moe_token_dispatcher_type="allgather", num_experts=experts, tensor_model_parallel_size=1,
        expert_tensor_parallel_size=None, expert_model_parallel_size=ranks,
    )  # fmt: skip
    assert by_flag("--moe-token-dispatcher-type allgather").applies(args) is is_refused
