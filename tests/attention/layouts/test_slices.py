"""Slices of micro-batches with rings and packs: attention in float64 against whole documents, and examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.keys import SwappedKeys
from bytescale_ext.activation.link import PlainLink
from bytescale_ext.attention.backend import Exchanges
from bytescale_ext.attention.layouts.parts import with_parts
from bytescale_ext.attention.layouts.slices import SliceLayout, slice_layouts
from bytescale_ext.attention.ring import attention_backward_into, attention_forward
from bytescale_ext.attention.slices import LayerPrefix
from bytescale_ext.attention.travel import ForwardResult
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.document_slices import DocumentSlices, SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.sizes import Slicing
from tests.attention.cases import ALL, GROUPS, MIXED, Case
from tests.sample import sampled

COST = CostModel(0.1, 1.0)
# A long document in the middle of a pack, rings with sequences that are long enough for slices, a rank without local
# documents and a rank with almost only local documents.
LONG = Case(
    lengths=(160, 9, 70, 3, 131, 48, 5),
    rounds=(((0, ALL), (1, (0,)), (2, (0,)), (3, (0,)), (4, (1, 2)), (5, (3,)), (6, (3,))),),
    num_ranks=4,
    num_padding=0,
)


def slices_of(case: Case, number: int, rank: int, rule: SliceRule) -> tuple[DocumentSlices, tuple[SliceLayout, ...]]:
    cut = rule(case.micro_batch(number, rank), case.lengths)
    rows = [cut.slice(index, rank).num_tokens + 2 for index in range(rule.slicing.num_slices)]
    layouts = slice_layouts(cut, rank, rows, case.window)
    if not case.parts:
        return cut, layouts
    return cut, tuple(
        replace(one, attention=with_parts(one.attention, cut.slice(one.index, rank).shards, end, dict(case.parts)))
        for one in layouts
        for end in [max((stop for _, stop in one.own.intervals), default=0)]
    )


def num_keys(layouts: Sequence[SliceLayout]) -> int:
    """Memory of the keys of a micro-batch. The slices own all its rows, each once."""
    held = sorted(interval for rows in layouts[-1].keys.places for interval in rows.intervals)
    assert layouts[-1].keys.places == layouts[-1].held.places + layouts[-1].swapped.places
    assert all(one.held.places == layouts[-1].held.places[: one.index + 1] for one in layouts)
    assert [start for start, _ in held] == [0, *(stop for _, stop in held[:-1])][: len(held)]
    return held[-1][1] if held else 0


def run_slices(case: Case, number: int, comm: MailboxComm, rule: SliceRule) -> Exchanges[torch.Tensor | None]:
    """Run all slices of a virtual rank forward, then backward from the last slice, and check against dense attention.

    Returns the gradient of the weight of an expansion, if the case has one.
    """
    cut, layouts = slices_of(case, number, comm.rank, rule)
    expected = list(zip(*case.expected(), strict=True))
    assert num_keys(layouts) >= sum(layout.own.num_rows for layout in layouts)
    link = PlainLink(HostArena(torch.empty(1 << 20, dtype=torch.uint8)))
    prefix = LayerPrefix(to_host=partial(SwappedKeys, link=link))
    backend, runs = case.backend(comm).for_backward(), []
    for layout in layouts:
        piece = cut.slice(layout.index, comm.rank)
        q, k, v, dout = (torch.cat((x, torch.ones(2, *x.shape[1:]).double())) for x in case.planned_inputs(piece))
        prefix.write(layout, k[: piece.num_tokens], v[: piece.num_tokens])
        keys = prefix.keys_of(layout)
        runs.append((layout, piece, q, dout, *(yield from attention_forward(q, *keys, layout.attention, backend))))
        del keys
        prefix.release()
        assert bool(link.used_bytes) == bool(cut.swapped)
    for layout, piece, q, dout, out, lse in reversed(runs):
        sums, computed = prefix.start_backward(layout), ForwardResult(q, *prefix.keys_of(layout), out, lse)
        dq = yield from attention_backward_into(dout, computed, sums, layout.attention, backend)
        assert not out[piece.num_tokens :].any()
        assert not dq[piece.num_tokens :].any()
        got = (out[: piece.num_tokens], dq[: piece.num_tokens], *(layout.own.take(total) for total in sums))
        for tensor, column in zip(got, expected, strict=True):
            torch.testing.assert_close(tensor, case.rows(piece, column), rtol=1e-10, atol=1e-10)
        del computed
        prefix.end_backward()
    assert not link.used_bytes
    return backend.expansion_gradient()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept_tokens", "summed_tokens", "swapped_tokens"),
    [(0, 0, 0), (1, 1000, 0), (1000, 1000, 0), (1000, 0, 0), (1000, 1, 0), (0, 1000, 1000), (1, 0, 1000), (0, 1, 1)],
    ids=["travel", "some-kept", "kept", "sums-travel", "some-sums-travel", "swapped", "some-swapped", "rest-travels"],
)
@pytest.mark.parametrize(
    ("case", "num_slices"), sampled([(MIXED, 5), (GROUPS, 2)], [(MIXED, 5)]), ids=["mixed", "groups"]
)
def test_slices_give_the_whole(
    case: Case, num_slices: int, kept_tokens: int, summed_tokens: int, swapped_tokens: int
) -> None:
    """All ranks run their slices in the same order without a deadlock, and the results match whole documents."""
    lengths = sorted(case.lengths[seq] for one in case.rounds for seq, ring in one if len(ring) > 1)
    middle = lengths[(len(lengths) - 1) // 2]  # rows of sequences in rings
    assert middle < lengths[-1]
    kept_tokens, summed_tokens, swapped_tokens = (
        middle if tokens == 1 else tokens for tokens in (kept_tokens, summed_tokens, swapped_tokens)
    )
    slicing = Slicing(num_slices, kept_tokens, summed_tokens=summed_tokens, swapped_tokens=swapped_tokens)
    rule = SliceRule(slicing, COST)
    for number in range(len(case.rounds)):
        comms = mailbox_comms(case.num_ranks)
        run_in_turn([run_slices(case, number, comm, rule) for comm in comms])


@pytest.mark.parametrize("num_slices", [1, 2, 4, 9])
@pytest.mark.slow
def test_slices_of_groups_give_the_whole(num_slices: int) -> None:
    """A slice may end in the shared tokens, in a document, or between documents. Rings run in addition to the group."""
    case = replace(LONG, parts=((2, (40, 1, 20, 9)), (6, (2, 1, 2)), (5, (1, 40, 7))))
    rule = SliceRule(Slicing(num_slices), COST)
    run_in_turn([run_slices(case, 0, comm, rule) for comm in mailbox_comms(case.num_ranks)])


def test_prefix_blocks_of_a_ring() -> None:
    """A ring of 3 has a sequence of 24 tokens in two slices. A member's keys are 2 rows of slice 0 and 6 of slice 1."""
    held = MicroBatch((Shard(0, zigzag_ranges(24, 3, 1), (0, 1, 2)),))
    first, second = slice_layouts(DocumentSlices(held, ((6, 24),), (0, 0)), 1, [2, 6])
    assert first.attention.passes[0].prefix_blocks == ()
    assert first.attention.passes[0].rows == (2, 2, 2)
    member = second.attention.passes[0]
    assert member.rows == (8, 8, 8)
    assert member.keys.intervals == ((0, 8),)
    described = [
        [(block.queries.intervals, block.keys.intervals, block.causal) for block in member.at(step)]
        for step in range(3)
    ]
    mine, fronts, backs = ((0, 6),), ((0, 3),), ((3, 6),)
    of_earlier = [(mine, ((0, 5),), False)]
    of_later = [(backs, ((0, 8),), False), (fronts, ((0, 2),), False)]
    of_source = {0: of_earlier, 1: [(mine, ((2, 8),), True), (mine, ((0, 2),), False)], 2: of_later}
    assert described == [of_source[member.source(step)] for step in range(3)]


def test_kept_keys_of_a_ring() -> None:
    """The same ring keeps keys: it has rows of all members in turn, and slice 1 sends 6 rows instead of 8."""
    held = MicroBatch((Shard(0, zigzag_ranges(24, 3, 1), (0, 1, 2)), Shard(1, ((0, 4),), (1,))))
    cut = DocumentSlices(held, ((6, 24),), (2, 4), kept=frozenset({0}))
    first, second = slice_layouts(cut, 1, [4, 8])
    assert num_keys([first, second]) == 24 + 4
    assert first.own.intervals == ((8, 10), (24, 26))
    assert second.own.intervals == ((10, 16), (26, 28))
    assert [rows.intervals for rows in second.held.places] == [
        ((0, 2), (8, 10), (16, 18), (24, 26)),
        ((2, 8), (10, 16), (18, 24), (26, 28)),
    ]
    member = second.attention.passes[0]
    assert [rows.intervals for rows in member.kept.whole] == [((0, 8),), ((8, 16),), ((16, 24),)]
    assert [rows.intervals for rows in member.kept.own] == [((2, 8),), ((10, 16),), ((18, 24),)]
    assert member.sent_keys.intervals == ((10, 16),)
    assert [member.travelling(one) for one in range(3)] == [6, 6, 6]
    assert second.summed == second.held
    assert [member.travelling_sums(one) for one in range(3)] == [6, 6, 6]
    sent = slice_layouts(replace(cut, sent_sums=frozenset({0})), 1, [4, 8])[1]
    assert sent.held == second.held
    assert [rows.intervals for rows in sent.summed.places] == [((8, 10), (24, 26)), ((10, 16), (26, 28))]
    assert [sent.attention.passes[0].travelling_sums(one) for one in range(3)] == [8, 8, 8]
    assert [sent.attention.passes[0].travelling(one) for one in range(3)] == [6, 6, 6]
    swapped = slice_layouts(replace(cut, swapped=frozenset({0})), 1, [4, 8])[1]
    assert [rows.intervals for rows in swapped.held.places] == [((24, 26),), ((26, 28),)]
    assert [rows.intervals for rows in swapped.swapped.places] == [
        ((0, 2), (8, 10), (16, 18)), ((2, 8), (10, 16), (18, 24)),
    ]  # fmt: skip
    assert (swapped.attention, swapped.own, swapped.summed) == (second.attention, second.own, second.summed)
    travelling = slice_layouts(DocumentSlices(held, ((6, 24),), (2, 4)), 1, [4, 8])[1].attention.passes[0]
    assert [travelling.travelling(one) for one in range(3)] == [8, 8, 8]
    assert (member.blocks, member.prefix_blocks) == (travelling.blocks, travelling.prefix_blocks)


@pytest.mark.parametrize("num_slices", [2, 4])
@pytest.mark.slow
def test_kept_keys_travel_once(num_slices: int) -> None:
    """For 160 tokens on 4 ranks, k slices send (k + 1) / 2 times the bytes, and fewer if keys are kept."""
    case = replace(LONG, lengths=(160,), rounds=(((0, ALL),),))
    sent = {}
    for name, rule in (("whole", SliceRule(Slicing(1))), ("travel", SliceRule(Slicing(num_slices))),
                       ("kept", SliceRule(Slicing(num_slices, 160))),
                       ("sums travel", SliceRule(Slicing(num_slices, 160, summed_tokens=159)))):  # fmt: skip
        comms = mailbox_comms(case.num_ranks)
        run_in_turn([run_slices(case, 0, comm, rule) for comm in comms])
        sent[name] = sum(comm.stats.bytes_sent for comm in comms)
    assert sent["travel"] == sent["whole"] * (num_slices + 1) / 2
    # Without slices keys travel forward and backward, and sums backward; kept keys travel only forward.
    assert sent["kept"] == sent["whole"] * 2 / 3
    assert sent["sums travel"] == sent["whole"] / 3 * (1 + (num_slices + 1) / 2)
