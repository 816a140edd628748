"""Schedules of slices: order, text, and exact formulas for idle time and memory with equal costs."""

from __future__ import annotations

import pytest

from bytescale_ext.plan.schedule.actions import (
    SliceSchedule,
    bubble_of_equal_costs,
    parse_schedule,
    seq1f1b_schedule,
    slice_group_size,
)
from bytescale_ext.plan.schedule.compare import PAPER_MODELS, SliceModel, schedule_figures
from bytescale_ext.plan.schedule.simulate import SimulatedSchedule, peak_in_flight, simulate_slices
from bytescale_ext.plan.step.sizes import Slicing

SIZES = [
    (p, m, k, v)
    for p in (1, 2, 3, 4, 6)
    for m in (1, 2, 5, 8)
    for k in (1, 2, 3, 4, 8)
    for v in (1, 2, 3)
    if v == 1 or (p > 2 and m * k >= slice_group_size(p, k) and m * k % slice_group_size(p, k) == 0)
]


def equal(schedule: SliceSchedule) -> SimulatedSchedule:
    return simulate_slices(schedule, lambda stage, action: 1.0 if action.kind == "F" else 2.0)


def test_the_order_of_two_stages() -> None:
    assert str(seq1f1b_schedule(2, 2, Slicing(2))).splitlines() == [
        "num_stages 2 num_micro_batches 2 num_slices 2 num_chunks 1 group_size 1 eager 0 zero_bubble 0",
        "stage 0   F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0",
        "stage 1   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0",
    ]


@pytest.mark.parametrize("sizes", SIZES)
def test_formulas_are_exact_for_equal_costs(sizes: tuple[int, int, int, int]) -> None:
    p, m, k, v = sizes
    schedule = seq1f1b_schedule(p, m, Slicing(k), v)
    assert equal(schedule).bubble == pytest.approx(bubble_of_equal_costs(p, m, k, v), abs=1e-12)
    for stage in range(p):
        assert peak_in_flight(schedule, stage) == schedule.peak_slices(stage)


def test_formulas_are_the_papers() -> None:
    assert bubble_of_equal_costs(4, 8) == 3 / 11
    assert bubble_of_equal_costs(4, 8, 4) == 3 / 35
    assert bubble_of_equal_costs(4, 8, 4, 2) == 3 / 67
    assert [seq1f1b_schedule(4, 8, Slicing(4)).peak_slices(stage) for stage in range(4)] == [7, 6, 5, 4]
    assert seq1f1b_schedule(4, 1, Slicing(4)).peak_slices(0) == 4
    assert seq1f1b_schedule(4, 8, Slicing(4), 2).peak_slices(0) == (2 + 1) * 4 + 4 - 2


def test_one_slice_is_1f1b() -> None:
    """Orders equal Megatron's for 3 stages and 4 micro-batches; pipeline_parallel/test_schedules.py runs Megatron."""
    assert [" ".join(f"{one.kind}{one.micro_batch}" for one in stage) for stage in seq1f1b_schedule(3, 4).stages] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize(
    ("p", "k", "v", "eager"), [(4, 1, 1, False), (3, 2, 1, True), (4, 1, 2, False), (3, 2, 3, False)]
)
def test_a_shorter_pipeline_leaves_micro_batches_of_a_longer_one_out(p: int, k: int, v: int, eager: bool) -> None:
    """Equal orders prevent circular waits of rings between pipelines."""
    slicing, per_group = Slicing(k, eager=eager), slice_group_size(p, k) // k if v > 1 else 1
    longest = seq1f1b_schedule(p, 6 * per_group, slicing, v)
    for count in range(per_group, 6 * per_group, per_group):
        left = [tuple(one for one in stage if one.micro_batch < count) for stage in longest.stages]
        assert list(seq1f1b_schedule(p, count, slicing, v).stages) == left


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 2, 4, 1), (4, 4, 3, 2), (3, 12, 11, 3)])
def test_text_parses_back(sizes: tuple[int, int, int, int]) -> None:
    p, m, k, v = sizes
    schedule = seq1f1b_schedule(p, m, Slicing(k), v)
    assert parse_schedule(str(schedule)) == schedule
    assert parse_schedule("\n" + str(schedule).replace("  ", "   ") + "\n") == schedule


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("num_slices", "slices", "its first line must give num_stages"),
        ("num_stages 2", "num_stages two", "its first line must give"),
        ("num_stages 2", "num_stages 3", "its first line gives 3 stages, but 2 follow"),
        ("stage 1", "stage 2", "'stage 1' and actions"),
        ("F0.1", "G0.1", "actions like F0.1"),
        ("F0.1", "F0", "actions like F0.1"),
    ],
)
def test_other_text_is_refused(before: str, after: str, message: str) -> None:
    text = str(seq1f1b_schedule(2, 1, Slicing(2)))
    for line in text.replace(before, after), "":
        with pytest.raises(ValueError, match=message if line else "its first line must give"):
            parse_schedule(line)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_are_positive(sizes: tuple[int, int, int]) -> None:
    num_stages, num_micro_batches, num_chunks = sizes
    with pytest.raises(ValueError, match="it must be at least 1"):
        seq1f1b_schedule(num_stages, num_micro_batches, num_chunks=num_chunks)


def test_the_eager_order_of_two_stages() -> None:
    """Stage 0 is two forward passes ahead of stage 1, and stores one more slice."""
    schedule = seq1f1b_schedule(2, 2, Slicing(2, eager=True))
    assert str(schedule).splitlines() == [
        "num_stages 2 num_micro_batches 2 num_slices 2 num_chunks 1 group_size 1 eager 1 zero_bubble 0",
        "stage 0   F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0",
        "stage 1   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0",
    ]
    assert parse_schedule(str(schedule)) == schedule
    with pytest.raises(ValueError, match="omit eager"):
        seq1f1b_schedule(3, 3, Slicing(2, eager=True), 2)


@pytest.mark.parametrize(("p", "m", "k"), [(2, 5, 3), (4, 8, 4), (4, 2, 6), (6, 5, 1)])
def test_an_eager_pipeline_of_equal_slices_is_as_fast_and_holds_more(p: int, m: int, k: int) -> None:
    schedule = seq1f1b_schedule(p, m, Slicing(k, eager=True))
    assert equal(schedule).bubble == pytest.approx(bubble_of_equal_costs(p, m, k), abs=1e-12)
    for stage in range(p):
        assert peak_in_flight(schedule, stage) == schedule.peak_slices(stage) == min(2 * (p - stage) + k - 2, m * k)


@pytest.mark.parametrize(
    ("num_slices", "partition", "least", "most"),
    [(1, "even", 0.27, 0.28), (4, "even", 0.38, 0.40), (4, "flops", 0.09, 0.11), (4, "time", 0.08, 0.11)],
)
def test_balanced_slices_leave_little_idle_time(num_slices: int, partition: str, least: float, most: float) -> None:
    model = SliceModel(PAPER_MODELS["gpt-7b"].shape, 131072, 8)
    figures = schedule_figures(model, 4, 8, Slicing(num_slices), 1, partition)
    assert least <= figures.bubble <= most
    schedule, lengths = seq1f1b_schedule(4, 8, Slicing(num_slices)), [float(length) for length in figures.slices]
    assert figures.peak_micro_batches == peak_in_flight(schedule, 0, lengths) / 131072
    sums = [length * 8 / 34 for length in lengths]  # 8 of 34 bytes per unit of the hidden size
    assert figures.activation_bytes == pytest.approx(peak_in_flight(schedule, 0, lengths, sums) * 8 * 34 * 4096 / 8)
