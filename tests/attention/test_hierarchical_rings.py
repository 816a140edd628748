"""Hierarchical rings against dense attention, on virtual ranks in float64: whole passes, slices, and sent bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bytescale_ext.attention.backend import Exchanges
from bytescale_ext.attention.layouts.layout import RingPass, ring_pass
from bytescale_ext.attention.layouts.route import Route
from bytescale_ext.attention.travel import TravellingKeys, TravellingSums
from bytescale_ext.attention.virtual import MailboxComm, MailboxPending, mailbox_comms, run_in_turn
from bytescale_ext.errors import PlanError
from bytescale_ext.parallel.p2p import Pending, Transfer
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Slicing
from tests.attention.cases import Case, assert_matches, assert_plan_is_exact, run_virtual
from tests.attention.layouts.test_slices import run_slices
from tests.sample import sampled

FORMS = [(4, 2), (6, 2), (10, 2), (6, 3), (15, 3), (8, 4), (12, 4), (10, 5), (16, 8)]
"""Return widths of rings, and widths of their inner rings."""


def case_of(width: int, inner_width: int, first: int = 0) -> Case:
    """Return documents of odd lengths in one hierarchical ring, one of them with one token on each rank."""
    ring = tuple(range(first, first + width))
    lengths = (3 * width + 1, width, 2 * width + 5)
    rounds = (tuple((seq, ring) for seq in range(3)),)
    return Case(lengths, rounds, first + width, heads=2, kv_heads=1, dim=4, inner_width=inner_width)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "inner"), sampled(FORMS, [form for form in FORMS if form[0] <= 10]))
def test_any_width_is_exact(width: int, inner: int) -> None:
    case = case_of(width, inner)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


# On nodes of 4: a ring of 8 over two whole nodes, a ring of 6 that begins in the middle of a node, a plain ring inside
# a node, a pack, and a plain ring over two nodes.
BESIDE = Case(
    lengths=(61, 33, 14, 9, 5, 12),
    rounds=(
        ((0, tuple(range(8))), (1, tuple(range(2, 8))), (2, (0, 1)), (3, (0,))),
        ((1, tuple(range(2, 8))), (4, (0,)), (5, (3, 4, 5))),
    ),
    num_ranks=8,
    inner_width=2,
)


@pytest.mark.slow
def test_rings_of_both_forms_beside_each_other_are_exact() -> None:
    for inner in (2, 4):
        case = replace(BESIDE, inner_width=inner)
        assert {member.route.inner_rings for member in case.layout(0, 2).passes} == {2: {3, 4}, 4: {1, 2}}[inner]
        results, _ = run_virtual(case, "reference", torch.float64)
        assert_matches(case, results, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("kept_tokens", "summed_tokens"), sampled([(0, 0), (1000, 1000), (1000, 0)], [(1000, 0)]))
@pytest.mark.parametrize(("width", "inner"), sampled([(6, 2), (9, 3)], [(6, 2)]))
def test_slices_are_exact(width: int, inner: int, kept_tokens: int, summed_tokens: int) -> None:
    case = replace(case_of(width, inner), num_padding=0)
    case = replace(case, lengths=tuple(4 * length for length in case.lengths))
    rule = SliceRule(Slicing(3, kept_tokens, summed_tokens=summed_tokens), CostModel(0.1, 1.0))
    run_in_turn([run_slices(case, 0, comm, rule) for comm in mailbox_comms(width)])


def count_links(comm: MailboxComm, links: Counter[tuple[int, int]]) -> None:
    """Make a communicator count the bytes that it sends to each rank."""
    exchange = comm.exchange

    def counted(sends: Sequence[Transfer], receives: Sequence[Transfer]) -> MailboxPending:
        for tensor, peer in sends:
            links[comm.rank, peer] += tensor.nbytes
        return exchange(sends, receives)

    comm.exchange = counted  # type: ignore[method-assign]


@pytest.mark.slow
def test_all_links_between_nodes_carry_the_same() -> None:
    """A ring of 8 on 2 nodes of 4 sends as many bytes as the plain ring, 1/7 on the busiest link between nodes."""
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


def any_nested_plan(source: random.Random) -> StepPlan:
    """Return a plan of 8 ranks on nodes of 4, with rings of any position, width and form, and packs."""
    count = source.randint(3, 9)
    firsts = np.array([source.randrange(8) for _ in range(count)])
    widths = np.array([source.randint(1, 8 - first) for first in firsts.tolist()])
    lengths = widths + np.array([source.randint(0, 30) for _ in range(count)])
    possible = Nodes(4, 2.0).inner_rings(firsts, widths)
    chosen = np.array([source.choice((1, most)) for most in possible.tolist()])
    orders = np.arange(count) // source.randint(1, 2)
    placed = PlacedRanks(8, lengths, firsts, widths, orders, inner_rings=chosen)
    return StepPlan(8, int(lengths.sum()), tuple(lengths.tolist()), placed)


@pytest.mark.slow
def test_random_plans_of_both_forms_are_exact() -> None:
    """Plans that pass the check run without a deadlock, for all forms of rings on a rank."""
    source, nested = random.Random(11), 0
    for _ in range(12):
        plan = any_nested_plan(source)
        try:
            check_step_plan(plan, ranks_per_node=4)
        except PlanError:  # rings couple two micro-batches of a rank
            continue
        assert_plan_is_exact(plan)
        assert isinstance(plan.ranks, PlacedRanks)
        nested += bool((plan.ranks.inner_rings > 1).any())
    assert nested >= 3


def travel(comm: MailboxComm, member: RingPass) -> Exchanges[tuple[list[float], list[torch.Tensor]]]:
    """Send keys and sums around a ring; return the keys that a rank received, and the sums that returned to it.

    Keys contain the number of their owner. A rank adds its own power of two to the sum of each key.
    """
    keys = torch.full((member.num_rows, 1, 2), float(comm.rank))
    keys_on_way = TravellingKeys(keys, keys, member, comm.exchange)
    sums_on_way = TravellingSums(keys, member, comm.exchange)
    seen: list[float] = []
    pending: Pending | None = None
    for step in range(member.width):
        arriving = keys_on_way.post(step)
        (owner,) = keys_on_way.here(step)[0].unique().tolist()
        seen.append(owner)
        if pending is not None:
            yield pending
        if step:
            sums_on_way.here(step).add_(2.0**comm.rank)
        pending = sums_on_way.post(step)
        if arriving is not None:
            yield arriving
            keys_on_way.arrive(step + 1)
    assert pending is not None
    yield pending
    if member.route.inner_rings > 1:
        yield sums_on_way.post_home()
    return seen, sums_on_way.home


@pytest.mark.parametrize(("width", "inner"), [*FORMS, (5, 5), (8, 8)])
def test_every_rank_adds_to_every_sum_once(width: int, inner: int) -> None:
    """The sum of a rank's own inner ring returns separately, the sums of all other inner rings as one total."""
    members = [ring_pass([3 * width + 1], Route(tuple(range(width)), index, width // inner)) for index in range(width)]
    found = run_in_turn([travel(comm, member) for comm, member in zip(mailbox_comms(width), members, strict=True)])
    for rank, (seen, home) in enumerate(found):
        assert sorted(seen) == list(range(width))
        assert seen[0] == rank
        assert {owner // inner for owner in seen[:inner]} == {rank // inner}
        neighbours = {one for one in range(width) if one // inner == rank // inner} - {rank}
        expected = [sum(2.0**one for one in neighbours)]
        if inner < width:
            expected.append(2.0**width - 1 - expected[0] - 2.0**rank)
        assert [one.unique().tolist() for one in home] == [[number] for number in expected]
