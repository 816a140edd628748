"""Peak memory of stages, against a walk through their schedule with a set of slices, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from bytescale_ext.plan.activation.forecast import DeviceNeed
from bytescale_ext.plan.activation.load import HeldSlices
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.memory.held import held_slices, local_shares, most_held, padded_rows, peak_memory
from bytescale_ext.plan.memory.stage_memory import LayerBytes, PassBytes, StageMemory
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ALL_SUMS, ONE_SLICE, Slicing
from tests.plan.activation.random_loads import random_load
from tests.sample import seeds

COST = CostModel(a=0.01, b=1.0)
BYTES = LayerBytes(10.0, 3.0, 6.0)


def memory_of(num_stages: int, layer: LayerBytes = BYTES) -> StageMemory:
    return StageMemory(layer, (1,) * num_stages, (0.0,) * num_stages, (0.0,) * num_stages)


def plan_of(lengths: tuple[int, ...], *ranks: tuple[tuple[tuple[int, ...], ...], ...]) -> StepPlan:
    """Return a plan of one or two ranks. Each micro-batch lists its sequences, sequences on both ranks first."""
    owners = [
        {rank for rank, rows in enumerate(ranks) if any(seq in row for row in rows)} for seq in range(len(lengths))
    ]
    return StepPlan(
        len(ranks),
        1000,
        lengths,
        tuple(
            tuple(
                MicroBatch(
                    tuple(
                        Shard(seq, zigzag_ranges(lengths[seq], len(ring), ring.index(rank)), ring)
                        for seq in row
                        for ring in [tuple(sorted(owners[seq]))]
                    )
                )
                for row in rows
            )
            for rank, rows in enumerate(ranks)
        ),
        aligned=True,
    )


def local(*tokens: int) -> StepPlan:
    return plan_of(tokens, tuple((seq,) for seq in range(len(tokens))))


def test_documents_of_a_rank_are_cut_as_the_rule_cuts_them() -> None:
    random, slicing = np.random.default_rng(0), Slicing(4)
    for _ in range(20):
        lengths = tuple(int(length) for length in random.integers(1, 300, 9))
        plan = plan_of(lengths, ((0, 1, 2, 3), (4,), (5, 6)), ((7, 8),))
        shares = local_shares(ShardTable.of(plan), COST, 4)
        assert shares.sum(axis=1) == pytest.approx(1.0)
        micro_batches = [micro_batch for rank in plan.ranks for micro_batch in rank]
        rows = ShardTable.of(plan).rows
        for number, micro_batch in enumerate(micro_batches):
            cut = SliceRule(slicing, COST)(micro_batch, lengths)
            tokens = (shares[rows == number] * ShardTable.of(plan).tokens[rows == number][:, None]).sum(axis=0)
            found = [stop - start for start, stop in map(cut.local_range, range(4))]
            np.testing.assert_allclose(found, tokens, atol=1.0)


def test_the_last_stage_holds_losses_of_slices_by_hand() -> None:
    """Micro-batches of 8 and 4 tokens have two slices. F0.0 F0.1 B0.1 F1.0 stores at most slices 0.0 and 0.1."""
    memory = replace(memory_of(2, LayerBytes(10.0, 0.0, 0.0, head=7.0)), state_bytes=(1.0, 2.0))
    table, even = ShardTable.of(local(8, 4)), CostModel(a=0.0, b=1.0)
    found = peak_memory(table, Slicing(2), even, memory)
    assert [one.working for one in found.stage_parts(memory)] == [0.0, 4 * 7.0]
    assert found.device_bytes(memory) == max(1.0 + 10 * found.tokens[0, 0], 2.0 + 4 * 7.0 + 10 * 8)
    assert [one.working for one in peak_memory(table, ONE_SLICE, even, memory).stage_parts(memory)] == [0.0, 0.0]
    schedule = seq1f1b_schedule(2, 2, Slicing(2))
    of_last = held_slices(schedule, 1, [4.0, 4.0], 0.0, LayerBytes(0.0, 0.0, 0.0, head=7.0))
    assert max(one.head for one in of_last) == 4 * 7.0


@pytest.mark.parametrize("seed", seeds(50))
def test_only_moments_that_no_other_exceeds_count(seed: int) -> None:
    dice = random.Random(seed)
    load, moments = random_load(dice), set()
    for _ in range(40):
        running = dice.choice((1, load.num_tokens))
        tokens = dice.randint(load.num_tokens, 4 * load.num_tokens)
        moments.add(HeldSlices(running, tokens, *(float(dice.randint(0, 3)) for _ in range(5))))
    kept, whole = most_held(moments), load.bytes_of()
    assert set(kept) < moments
    for resident, moves, share in product((0, 2), (True, False), (0.0, 0.5, 1.0)):
        needs = [DeviceNeed.of(replace(load, slices=tuple(each)), resident, moves) for each in (kept, moments)]
        assert needs[0].device_bytes(share * whole) == needs[1].device_bytes(share * whole)


def test_a_slice_computes_its_layer_again_alone() -> None:
    """For micro-batches of 8 tokens on one stage, the recomputed layer has 8 tokens, or 4 with two slices."""
    passes = PassBytes(8, hidden=0.0, in_mlp=0.0, of_keys=5 / 8, logits=0.0, loss_tokens=np.inf)
    again = replace(memory_of(1, LayerBytes(10.0, 0.0, 0.0)), passes=passes).recomputing(4.0)
    even, table = CostModel(a=0.0, b=1.0), ShardTable.of(local(8, 8))
    layers, states = again.num_layers[0], again.state_bytes[0]
    for slicing, tokens in ((ONE_SLICE, 8), (Slicing(2), 4)):
        found = peak_memory(table, slicing, even, again)
        assert found.device_bytes(again) == states + layers * 4.0 * 8 + 5.0 + tokens * 6.0
        assert found.device_parts(again).working == 5.0 + tokens * 6.0


def test_rotary_angles_are_held_once_on_a_stage() -> None:
    """Micro-batches of 8 tokens run on one stage of four layers, or on two virtual stages of two layers each."""
    layer, even, table = LayerBytes(10.0, 0.0, 0.0), CostModel(a=0.0, b=1.0), ShardTable.of(local(8, 8))
    memory = replace(memory_of(1, layer), num_layers=(4,))
    with_angles = replace(memory, layer=replace(layer, angles=3.0))
    for slicing in (ONE_SLICE, Slicing(2)):
        more = peak_memory(table, slicing, even, with_angles).device_bytes(with_angles)
        assert more == peak_memory(table, slicing, even, memory).device_bytes(memory) + 8 * 3.0
    virtual = peak_memory(table, ONE_SLICE, even, with_angles, num_chunks=2).device_bytes(with_angles)
    of_layers = peak_memory(table, ONE_SLICE, even, memory, num_chunks=2)
    assert virtual == of_layers.device_bytes(memory) + of_layers.tokens[0, 0] * 2 * 3.0
    empty = replace(with_angles, num_layers=(0,))
    assert peak_memory(table, ONE_SLICE, even, empty).device_bytes(empty) == 0.0


@pytest.mark.parametrize(("eager", "ahead"), [(True, 2.0), (False, 0.0)])
def test_an_eager_stage_has_received_its_next_input_by_hand(eager: bool, ahead: float) -> None:
    """Micro-batches of 8 and 4 tokens run on two stages; the last stage runs F0.0 F0.1 B0.1 F1.0 B0.0 and so on.

    B0.1 is the peak: slices 0.0 and 0.1 of 4 tokens are in memory, and slice 1.0 of 2 tokens has arrived.
    """
    passes = PassBytes(8, hidden=0.0, in_mlp=5.0, of_keys=0.0, logits=0.0, loss_tokens=np.inf, message=7.0)
    memory = replace(memory_of(2, LayerBytes(10.0, 0.0, 0.0)), passes=passes)
    table, slicing = ShardTable.of(local(8, 4)), Slicing(2, eager=eager)
    last = peak_memory(table, slicing, CostModel(a=0.0, b=1.0), memory).stage_parts(memory)[1]
    assert (last.activations, last.working) == (10 * 8, 4 * 5 + ahead * 7)


def test_a_pass_adds_to_what_is_held_while_it_runs_by_hand() -> None:
    """With two stages and micro-batches of 2, 8 and 4 tokens, the first stage runs F0 F1 B0 F2 B1 B2.

    B1 is the largest pass, with 8 tokens, while micro-batches 1 and 2 are in memory. The last stage has one
    micro-batch at a time.
    """
    passes = PassBytes(8, hidden=0.0, in_mlp=5.0, of_keys=0.0, logits=9.0, loss_tokens=6.0, buffer=2.0)
    memory = replace(memory_of(2, LayerBytes(10.0, 0.0, 0.0)), passes=passes)
    found = peak_memory(ShardTable.of(local(2, 8, 4)), ONE_SLICE, CostModel(a=0.0, b=1.0), memory)
    layers = memory.num_layers
    first, last = found.stage_parts(memory)
    assert (first.activations, first.working) == (layers[0] * 10 * (8 + 4), 8 * 5 + 8 * 2)
    assert (last.activations, last.working) == (layers[1] * 10 * 8, 6 * 9 + 8 * 2)
    assert found.device_bytes(memory) == max(first.total, last.total)
    assert found.device_parts(memory) == max((first, last), key=lambda parts: parts.total)


def test_full_recompute_keeps_keys_in_slices_alone() -> None:
    passes = PassBytes(8, hidden=0.0, in_mlp=0.0, of_keys=0.0, logits=0.0, loss_tokens=np.inf)
    memory = replace(memory_of(1, LayerBytes(10.0, 3.0, 0.0)), passes=passes).recomputing(4.0, sliced=True)
    even, table = CostModel(a=0.0, b=1.0), ShardTable.of(local(8, 8))
    for slicing, kept, again in ((ONE_SLICE, 4.0, 6.0 * 8), (Slicing(2), 7.0, 3.0 * 4)):
        parts = peak_memory(table, slicing, even, memory).device_parts(memory)
        assert (parts.activations, parts.working) == (memory.num_layers[0] * 8 * kept, again)


@pytest.mark.parametrize(("multiple", "of_whole", "of_slice"), [(1, 5, 2.5), (4, 8, 4), (16, 16, 16)])
def test_padding_is_held_as_activations(multiple: int, of_whole: float, of_slice: float) -> None:
    """A micro-batch of 5 tokens runs on one stage. Padding has no keys, so no gradients of padding are summed."""
    memory, table, even = replace(memory_of(1), rows_multiple=multiple), ShardTable.of(local(5)), CostModel(0.0, 1.0)
    found = peak_memory(table, ONE_SLICE, even, memory)
    assert found.layer_bytes.tolist() == [[of_whole * 10]]
    found = peak_memory(table, Slicing(2), even, memory)
    assert found.tokens.tolist() == [[2 * of_slice]]
    assert found.layer_bytes.tolist() == [[2 * of_slice * 10]]  # before the first backward pass
    assert padded_rows(np.array([0.0, 1.0, 32.0, 32.5]), 16).tolist() == [16, 16, 32, 48]


@pytest.mark.parametrize("seed", seeds(20))
def test_against_a_walk_through_the_schedule(seed: int) -> None:
    source = random.Random(seed)
    lengths = tuple(source.randint(4, 200) for _ in range(6))
    rows = ((0, 3), (1,), (2, 4), (5,))
    plan = plan_of(lengths, rows, ((0,), (1,), (2,), (5,)) if source.random() < 0.5 else ())
    slicing = Slicing(source.randint(1, 5), source.choice((0, 100, 1000)), source.random() < 0.3)
    slicing = replace(slicing, summed_tokens=source.choice((0, 100, ALL_SUMS)), swapped_tokens=(seed % 3) * 75)
    if slicing.num_slices == 1:
        slicing = ONE_SLICE
    num_stages = source.randint(1, 4)
    table = ShardTable.of(plan)
    found = peak_memory(table, slicing, COST, memory_of(num_stages))
    of_ranks = dict(zip(table.seqs.tolist(), local_shares(table, COST, slicing.num_slices), strict=True))
    for rank, micro_batches in enumerate(plan.ranks):
        shares = [
            [_share(plan, row, index, slicing, of_ranks) for index in range(slicing.num_slices)]
            for row in micro_batches
        ]
        for stage in range(num_stages):
            walked = _walk(shares, num_stages, stage, slicing) if micro_batches else (0.0,) * 4
            figures = (found.tokens, found.kept_keys, found.layer_bytes, found.host_keys)
            assert [figure[stage, rank] for figure in figures] == pytest.approx(walked)


def _share(
    plan: StepPlan, micro_batch: MicroBatch, index: int, slicing: Slicing, of_ranks: dict[int, Any]
) -> tuple[float, ...]:
    """Return tokens of each slice: own, others with keys on the device, others with sums, swapped own, all swapped.

    ``of_ranks``: shares of sequences that are on one rank.
    """
    own = kept = with_sums = own_swapped = swapped = 0.0
    for shard in micro_batch.shards:
        length, width = plan.lengths[shard.seq], len(shard.ring)
        cut = SliceShares.of(COST, np.array([float(length)]), np.array([float(width)]), slicing)
        own += shard.num_tokens * (cut.tokens[0] if width > 1 else of_ranks[shard.seq])[index]
        if width > 1 and slicing.num_slices > 1 and length <= max(slicing.kept_tokens, slicing.swapped_tokens):
            others = (length - shard.num_tokens) * cut.tokens[0, index]
            with_sums += others if length <= slicing.summed_tokens else 0.0
            if length <= slicing.kept_tokens:
                kept += others
            else:
                own_swapped += shard.num_tokens * cut.tokens[0, index]
                swapped += length * cut.tokens[0, index]
    return own, kept, with_sums, own_swapped, swapped


def _walk(shares: list[list[tuple[float, ...]]], num_stages: int, stage: int, slicing: Slicing) -> list[float]:
    live: set[tuple[int, int]] = set()
    sums: set[tuple[int, int]] = set()
    most = [0.0] * 4
    actions = seq1f1b_schedule(num_stages, len(shares), slicing).stages[stage]
    reads = [sum(shares[number][earlier][4] for earlier in range(index + 1)) for _, number, index, _ in actions]
    for (kind, number, index, _), read, following in zip(actions, reads, [*reads[1:], 0.0], strict=True):
        if kind == "F":
            live.add((number, index))
        else:
            live.remove((number, index))
            sums = {one for one in sums if one[0] != number} | {(number, earlier) for earlier in range(index)}
        own, kept, own_swapped, in_host = (sum(shares[a][b][part] for a, b in live) for part in (0, 1, 3, 4))
        summed = sum(shares[a][b][0] + shares[a][b][2] for a, b in sums)
        on_device = kept - own_swapped + read + max(read, following)  # keys read back, in this layer and in the next
        now = own, kept, 10 * own + 3 * on_device + 6 * summed, in_host
        most = [max(pair) for pair in zip(most, now, strict=True)]
    return most


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_slices_with_swapped_keys_hold_two_layers_of_them(num_chunks: int) -> None:
    """Activations and sums equal the same slices with keys on the device."""
    schedule = seq1f1b_schedule(2, 4, Slicing(2), num_chunks)
    kept, swapped = (
        held_slices(schedule, 0, [6.0, 4.0], 30.0, LayerBytes(0.0, 3.0, 6.0), is_swapped)
        for is_swapped in (False, True)
    )
    assert len(kept) == len(swapped) > 1
    attended = {6.0: 6.0, 4.0: 10.0}  # tokens up to the end of a slice, by the tokens of the slice
    for one, other in zip(
        sorted(kept, key=lambda held: (held.running, held.tokens, held.bytes)),
        sorted(swapped, key=lambda held: (held.running, held.tokens, held.bytes)),
        strict=True,
    ):
        assert (one.running, one.tokens, one.gathered) == (other.running, other.tokens, other.gathered)
        assert other.in_host == one.bytes - other.bytes == 4 * 3 * one.tokens
        assert other.read == 2 * 4 * 3 * attended[other.running]
        assert one.read == one.in_host == 0
