"""Settings of layers that refusals depend on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.bytescale.arguments.layer_settings import AttentionChoice, Balancing, QueryGroups, Windows


@pytest.mark.parametrize(
    ("size", "elsewhere"), [(None, False), ((7, 0), False), ((7, 1), True), ((0, 0), True), ((7,), True)]
)
def test_windows_look_back_alone(size: tuple[int, ...] | None, elsewhere: bool) -> None:
    assert Windows(size).look_elsewhere() is elsewhere


def test_groups_have_equal_heads() -> None:
    assert [QueryGroups(8, groups).are_uneven() for groups in (None, 4, 3)] == [False, False, True]


def test_one_way_or_several() -> None:
    assert Balancing("none").ways == {"none"}
    assert not Balancing(["aux_loss", "none"]).is_beyond("aux_loss", "none")
    assert Balancing(["aux_loss", "sinkhorn"]).is_beyond("aux_loss", "none")


def test_a_backend_by_name() -> None:
    names: list[Any] = [SimpleNamespace(name=name) for name in ("auto", "flash")]
    assert [AttentionChoice(name).is_chosen() for name in names] == [False, True]
