"""Refusals of activation policies, by conditions on several arguments."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.bytescale.arguments.refusals import Refusal
from megatron.bytescale.features.activations.refusals import REFUSALS


def by_flag(flag: str) -> Refusal:
    (row,) = (row for row in REFUSALS if row.flag == flag)
    return row


def test_rows_are_of_this_feature() -> None:
    assert {name for row in REFUSALS for name in row.instead} == {"activations"}


@pytest.mark.parametrize(
    ("granularity", "modules", "is_refused"),
    [(None, None, False), ("full", None, True), ("selective", None, True), ("selective", ["moe_act"], False),
     ("selective", ["moe", "mlp"], True)],
)  # fmt: skip
def test_only_parts_of_experts_may_be_recomputed(
    granularity: str | None, modules: list[str] | None, is_refused: bool
) -> None:
    args = Namespace(recompute_granularity=granularity, recompute_modules=modules, recompute_activations=False)
    row = by_flag("--recompute-granularity")
    assert row.applies(args) is is_refused
    args.recompute_activations = True
    assert row.applies(args)
