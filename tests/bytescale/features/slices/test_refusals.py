"""Refusals of pipelines in slices, by conditions on several arguments."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.bytescale.arguments.refusals import Refusal
from megatron.bytescale.features.slices.refusals import REFUSALS


def by_flag(flag: str) -> Refusal:
    (row,) = (row for row in REFUSALS if row.flag == flag)
    return row


def test_rows_are_of_this_feature() -> None:
    assert {name for row in REFUSALS for name in row.instead} == {"slices"}


@pytest.mark.parametrize(("ways", "is_refused"), [("seq_aux_loss", False), (["aux_loss", "sinkhorn"], True)])
def test_balancing_by_statistics_that_a_slice_lacks(ways: str | list[str], is_refused: bool) -> None:
    row = by_flag("--moe-router-load-balancing-type of slices")
    assert row.applies(Namespace(num_experts=4, moe_router_load_balancing_type=ways)) is is_refused
    assert not row.applies(Namespace(num_experts=None, moe_router_load_balancing_type=ways))
