"""Route of keys in plain and hierarchical rings."""

from __future__ import annotations

import pytest

from bytescale_ext.attention.layouts.route import Route

FORMS = [(width, rings) for width in range(2, 17) for rings in range(1, width) if width % rings == 0]
"""Return widths and numbers of inner rings with at least two members each."""


def members_of(width: int, inner_rings: int, first: int = 0) -> list[Route]:
    ring = tuple(range(first, first + width))
    return [Route(ring, index, inner_rings) for index in range(width)]


@pytest.mark.parametrize(("width", "inner_rings"), FORMS)
def test_keys_come_from_where_they_were(width: int, inner_rings: int) -> None:
    """Keys come from the previous member within a round, and at the start of a round from the counterpart."""
    members = members_of(width, inner_rings, first=3)
    inner = members[0].inner_width
    for member in members:
        assert sorted(member.source(step) for step in range(width)) == list(range(width))
        assert member.source(0) == member.source(width) == member.index
        before, counterpart = (members[rank - 3] for rank in (member.previous_rank, member.previous_counterpart))
        assert members[member.next_rank - 3].previous_rank == member.ring[member.index]
        assert members[member.next_counterpart - 3].previous_counterpart == member.ring[member.index]
        for step in range(1, width):
            earlier = counterpart.source(step - inner) if step % inner == 0 else before.source(step - 1)
            assert member.source(step) == earlier


@pytest.mark.parametrize(("width", "inner_rings"), FORMS)
def test_rounds_stay_inside_inner_rings(width: int, inner_rings: int) -> None:
    for member in members_of(width, inner_rings):
        inner = member.inner_width
        for step in range(width):
            assert member.source(step) // inner == member.source(step - step % inner) // inner
        assert member.next_rank // inner == member.previous_rank // inner == member.index // inner


def test_hierarchical_rings_have_at_most_eight_peers() -> None:
    """At most four peers are inside a node of 4, and four are counterparts in other nodes, for all rings."""
    peers: dict[int, set[int]] = {}
    for width in range(8, 33, 4):
        for first in range(0, 64 - width, 4):
            for member in members_of(width, width // 4, first):
                found = peers.setdefault(member.ring[member.index], set())
                found |= {member.next_rank, member.previous_rank, member.next_counterpart, member.previous_counterpart}
    for rank, found in peers.items():
        inside = {peer for peer in found if peer // 4 == rank // 4}
        assert found - inside <= {rank - 8, rank - 4, rank + 4, rank + 8}
        assert len(inside) == 2


def test_example_of_two_nodes() -> None:
    member = Route(tuple(range(8)), 0, 2)
    assert [member.source(step) for step in range(8)] == [0, 1, 3, 2, 4, 5, 7, 6]
    assert (member.next_rank, member.previous_rank) == (2, 1)
    assert (member.next_counterpart, member.previous_counterpart) == (4, 4)
