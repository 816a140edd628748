"""Hierarchical rings against dense attention, on virtual ranks in float64: whole passes, slices, and what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bytescale_ext.attention.virtual import MailboxComm, MailboxPending, mailbox_comms, run_in_turn
from bytescale_ext.parallel.p2p import Transfer
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing
from tests.attention.cases import Case, assert_matches, run_virtual
from tests.attention.layouts.test_slices import run_slices

FORMS = [(width, inner) for inner in (2, 3, 4, 5, 8) for width in range(2 * inner, 17, inner)]
"""Widths of rings, and members of their inner rings."""


def case_of(width: int, inner_width: int, first: int = 0) -> Case:
    """Documents of odd lengths in one hierarchical ring, one of them with one token on each rank."""
    ring = tuple(range(first, first + width))
    lengths = (3 * width + 1, width, 2 * width + 5)
    rounds = (tuple((seq, ring) for seq in range(3)),)
    return Case(lengths, rounds, first + width, heads=2, kv_heads=1, dim=4, inner_width=inner_width)


@pytest.mark.parametrize(("width", "inner"), FORMS)
def test_any_width_is_exact(width: int, inner: int) -> None:
    case = case_of(width, inner)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


# On nodes of 4: rings of 8 and 6 over two nodes, one of two whole nodes and one that begins in the middle of a node,
# beside a plain ring inside a node, a pack, and a plain ring over the border of nodes.
BESIDE = Case(
    lengths=(61, 33, 14, 9, 5, 12),
    rounds=(
        ((0, tuple(range(8))), (1, tuple(range(2, 8))), (2, (0, 1)), (3, (0,))),
        ((1, tuple(range(2, 8))), (4, (0,)), (5, (3, 4, 5))),
    ),
    num_ranks=8,
    inner_width=2,
)


def test_rings_of_both_forms_beside_each_other_are_exact() -> None:
    for inner in (2, 4):
        case = replace(BESIDE, inner_width=inner)
        assert {member.route.inner_rings for member in case.layout(0, 2).passes} == {2: {3, 4}, 4: {1, 2}}[inner]
        results, _ = run_virtual(case, "reference", torch.float64)
        assert_matches(case, results, 1e-10)


@pytest.mark.parametrize(("kept_tokens", "summed_tokens"), [(0, 0), (1000, 1000), (1000, 0)])
@pytest.mark.parametrize(("width", "inner"), [(4, 2), (6, 2), (8, 4), (9, 3)])
def test_slices_are_exact(width: int, inner: int, kept_tokens: int, summed_tokens: int) -> None:
    case = replace(case_of(width, inner), num_padding=0)
    case = replace(case, lengths=tuple(4 * length for length in case.lengths))
    for num_slices in (2, 3):
        rule = SliceRule(Slicing(num_slices, kept_tokens, summed_tokens=summed_tokens), CostModel(0.1, 1.0))
        run_in_turn([run_slices(case, 0, comm, rule) for comm in mailbox_comms(width)])


def count_links(comm: MailboxComm, links: Counter[tuple[int, int]]) -> None:
    """Make a comm add the bytes that it sends to each rank."""
    exchange = comm.exchange

    def counted(sends: Sequence[Transfer], receives: Sequence[Transfer]) -> MailboxPending:
        for tensor, peer in sends:
            links[comm.rank, peer] += tensor.nbytes
        return exchange(sends, receives)

    comm.exchange = counted  # type: ignore[method-assign]


def test_all_links_between_nodes_carry_the_same() -> None:
    """A ring of 8 on 2 nodes of 4: as many bytes as the plain ring, 1/7 of them on the busiest link between nodes."""
    found = []
    for inner in (0, 4):
        case = replace(case_of(8, inner), lengths=(64, 128, 256))
        links: Counter[tuple[int, int]] = Counter()
        comms = mailbox_comms(8)
        for comm in comms:
            count_links(comm, links)
        run_virtual(case, "reference", torch.float64, comms)
        between = [num_bytes for (rank, peer), num_bytes in links.items() if rank // 4 != peer // 4]
        found.append((links.total(), len(between), max(between)))
    (plain_total, plain_links, plain_most), (total, num_links, most) = found
    assert (plain_links, num_links) == (2, 8)
    assert total == plain_total
    assert plain_most == 7 * most
