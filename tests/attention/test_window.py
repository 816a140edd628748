"""Sliding windows on virtual ranks and in slices, in float64 against dense attention with a band of keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention import window as of_windows
from bytescale_ext.attention.layouts.slices import slice_layouts
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing
from tests.attention.cases import ALL, GROUPS, MIXED, TINY, Case, assert_matches, run_virtual, whole
from tests.attention.layouts.test_slices import COST, LONG, run_slices
from tests.sample import examples, sampled


@pytest.mark.parametrize("window", [1, 2, 5, 11, 30])
@pytest.mark.parametrize("case", [MIXED, TINY, GROUPS], ids=["mixed", "tiny", "groups"])
def test_exact_in_float64(case: Case, window: int) -> None:
    """Rings of 1 to 4 ranks have sequences shorter and longer than the window, packs, padding, and once sinks."""
    case = dataclasses.replace(case, window=window, sinks=window == 5)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


@pytest.mark.parametrize("window", [3, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_cpu_flash(window: int, dtype: torch.dtype, tolerance: float) -> None:
    case = Case((301, 90, 7), (((0, (0, 1, 2)), (1, (0,)), (2, (0,))),), 3, window=window)
    results, _ = run_virtual(case, "cpu_flash", dtype)
    assert_matches(case, results, tolerance, dtype)


@pytest.mark.slow
@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=examples(60), deadline=None)
def test_any_width_length_and_window(width: int, length: int, window: int) -> None:
    case = whole(max(width, length), tuple(range(width)), heads=2, kv_heads=1, dim=4)
    case = dataclasses.replace(case, window=window)
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("window", sampled([2, 9, 50], [9]))
@pytest.mark.parametrize("kept_tokens", [0, 70, 1000])
@pytest.mark.parametrize(("case", "num_slices"), [(LONG, 4), (GROUPS, 2)], ids=["long", "groups"])
def test_slices_give_the_whole(case: Case, num_slices: int, kept_tokens: int, window: int) -> None:
    case = dataclasses.replace(case, window=window)
    rule = SliceRule(Slicing(num_slices, kept_tokens, summed_tokens=kept_tokens), COST)
    for number in range(len(case.rounds)):
        run_in_turn([run_slices(case, number, comm, rule) for comm in mailbox_comms(case.num_ranks)])


def test_only_keys_of_the_window_travel() -> None:
    """With 160 tokens on 4 ranks, the 12 keys before each of six runs of 20 tokens travel to the run's rank."""
    case = Case((160,), (((0, ALL),),), 4)
    sent = {}
    for window in (None, 12):
        _, comms = run_virtual(dataclasses.replace(case, window=window), "reference", torch.float64)
        sent[window] = sum(comm.stats.bytes_sent for comm in comms)
    row_bytes = 2 * case.kv_heads * case.dim * 8  # keys and values
    # Forward keys, backward keys and gradients; in a ring D - 1 times each.
    assert sent[None] == 3 * 160 * 3 * row_bytes
    assert sent[12] == 3 * 6 * 12 * row_bytes


@pytest.mark.parametrize("kept_tokens", [0, 1000])
def test_slices_keep_no_keys_of_others(kept_tokens: int) -> None:
    assert of_windows.__doc__ is not None
    rule = SliceRule(Slicing(4, kept_tokens, summed_tokens=kept_tokens), COST)
    for rank in range(4):
        micro_batch = LONG.micro_batch(0, rank)
        cut = rule(micro_batch, LONG.lengths)
        rows = [cut.slice(index, rank).num_tokens for index in range(4)]
        full, limited = (slice_layouts(cut, rank, rows, window)[-1].held.places for window in (None, 30))
        assert sum(one.num_rows for one in limited) == micro_batch.num_tokens
        assert (sum(one.num_rows for one in full) > micro_batch.num_tokens) == bool(kept_tokens)
