"""The largest score of each head against dense scores: blocks, packs, rings, windows, slices, latents, shared parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention import largest
from bytescale_ext.attention.largest import raise_largest_
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.ring import attention_forward
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from tests.attention.cases import GROUPS, MIXED, TINY, Case, block_of, block_tensors

NONE = -torch.inf


def of_block(q: torch.Tensor, k: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    """Return the largest score of each head, written out one query at a time."""
    group, found = q.shape[1] // k.shape[1], torch.full((q.shape[1],), NONE, dtype=torch.float64)
    for rows, keys in block.documents():
        before = (keys.stop - keys.start) - (rows.stop - rows.start)
        for number in range(rows.stop - rows.start):
            own = keys.start + before + number
            first = keys.start if block.window is None else max(keys.start, own - block.window)
            seen = slice(first, own + 1) if block.causal else keys
            scores = torch.einsum(
                "hd,khd->hk", q[rows.start + number].double(), k[seen].double().repeat_interleave(group, 1)
            )
            found = torch.maximum(found, scores.amax(1) * block.scale)
    return found


BLOCKS = {
    "one document": block_of([40]),
    "pack": block_of([7, 1, 30, 2, 20]),
    "rectangles": block_of([7, 3, 11], [2, 30, 5], causal=False),
    "without keys": block_of([7, 0, 4], [0, 9, 3], causal=False),
    "window": block_of([33, 4, 1], window=5),
    "window after keys": block_of([9, 14, 2], [13, 30, 2], window=8),
}


@pytest.mark.parametrize("tile", [1, 3, 16, 512])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 16 queries and all heads has few keys; a tile of 512 has all."""
    monkeypatch.setattr(largest, "TILE_QUERIES", tile)
    monkeypatch.setattr(largest, "TILE_SCORES", {"cpu": 4 * tile * 5})
    block = BLOCKS[name]
    q, k, _, _ = block_tensors(block, torch.float64)
    found = torch.full((4,), NONE, dtype=torch.float64)
    raise_largest_(found, q, k, block)
    torch.testing.assert_close(found, of_block(q, k, block), rtol=1e-12, atol=0)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_block(data: st.DataObject) -> None:
    queries = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    causal = data.draw(st.booleans())
    window = data.draw(st.one_of(st.none(), st.integers(1, 25))) if causal else None
    more = [data.draw(st.integers(0, 9)) for _ in queries]
    keys = [q + one for q, one in zip(queries, more, strict=True)] if window else queries if causal else more
    block = block_of(queries, keys, causal, window=window)
    q, k, _, _ = block_tensors(block, torch.float64)
    found = torch.full((4,), NONE, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest, "TILE_QUERIES", data.draw(st.integers(1, 30)))
        patch.setattr(largest, "TILE_SCORES", {"cpu": data.draw(st.integers(1, 1000))})
        raise_largest_(found, q, k, block)
    torch.testing.assert_close(found, of_block(q, k, block), rtol=1e-12, atol=0)


def test_scores_of_half_precision_are_not_rounded() -> None:
    block = block_of([60])
    q, k, _, _ = block_tensors(block, torch.bfloat16)
    found = torch.full((4,), NONE)
    raise_largest_(found, q, k, block)
    torch.testing.assert_close(found.double(), of_block(q, k, block), rtol=1e-6, atol=0)


def test_an_earlier_larger_score_stays() -> None:
    block = block_of([5])
    q, k, _, _ = block_tensors(block, torch.float32)
    found = torch.tensor([99.0, NONE, 99.0, NONE])
    raise_largest_(found, q, k, block)
    wanted = of_block(q, k, block).float()
    wanted[[0, 2]] = 99.0
    torch.testing.assert_close(found, wanted)


def of_case(case: Case) -> torch.Tensor:
    """Return the largest score of each head over all sequences of a case, dense."""
    found = torch.full((case.heads,), NONE, dtype=torch.float64)
    for seq, length in enumerate(case.lengths):
        q, k, _, _ = case.values(seq, torch.float64)
        block = block_of([length], scale=case.scale, window=case.window)
        of_group = dict(case.parts).get(seq)
        if of_group is None:
            found = torch.maximum(found, of_block(q, k, block))
            continue
        first = of_group[0]
        starts = [sum(of_group[:number]) for number in range(1, len(of_group))]
        for start, size in zip((0, *starts), of_group, strict=True):
            prompt = range(first) if start else range(0)
            own = [*prompt, *range(start, start + size)]
            rows = torch.tensor(own)
            found = torch.maximum(found, of_block(q[rows], k[rows], block_of([len(own)], scale=case.scale)))
    return found


def of_ranks(case: Case) -> torch.Tensor:
    """Return the maximum over all ranks and rounds, as training reduces it."""
    comms = mailbox_comms(case.num_ranks)
    of_rank = [torch.full((case.heads,), NONE, dtype=torch.float64) for _ in comms]
    for number in range(len(case.rounds)):
        passes = []
        for rank, comm in enumerate(comms):
            q, k, v, _ = case.inputs(number, rank, torch.float64)
            backend = dataclasses.replace(case.backend(comm), largest=of_rank[rank])
            passes.append(attention_forward(q, k, v, case.layout(number, rank), backend))
        run_in_turn(passes)
    return torch.stack(of_rank).amax(0)


CASES = {
    "mixed": MIXED,
    "tiny": TINY,
    "groups": GROUPS,
    "heads": dataclasses.replace(MIXED, heads=3, kv_heads=3),
    "one key head": dataclasses.replace(MIXED, heads=8, kv_heads=1),
    "uneven": dataclasses.replace(MIXED, uneven=True),
    "window": dataclasses.replace(MIXED, window=6),
    "window of groups": dataclasses.replace(GROUPS, window=4),
    "sinks": dataclasses.replace(MIXED, sinks=True),
    "inner rings": Case((64, 41), (tuple((seq, tuple(range(8))) for seq in (0, 1)),), 8, inner_width=4),
    "shared parts": Case((30, 22), (((0, (0,)), (1, (0,))),), 1, parts=((0, (9, 5, 16)),)),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_largest_score_of_all_sequences(name: str) -> None:
    case = CASES[name]
    torch.testing.assert_close(of_ranks(case), of_case(case), rtol=1e-12, atol=0)
