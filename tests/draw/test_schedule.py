"""The picture of a schedule, read back from its SVG: boxes, their places and their text."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from bytescale_ext.draw.figure import ink_on
from bytescale_ext.draw.schedule import _colour, draw_schedule
from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.schedule.simulate import SimulatedSchedule, simulate_slices
from bytescale_ext.plan.step.sizes import Slicing


def simulated(num_stages: int, num_micro_batches: int, num_slices: int, num_chunks: int = 1) -> SimulatedSchedule:
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, Slicing(num_slices), num_chunks)
    return simulate_slices(schedule, lambda stage, action: {"F": 1.0, "B": 2.0}[action.kind])


def drawn(result: SimulatedSchedule, path: Path) -> tuple[list[str], list[str]]:
    """Return the fill colours of the boxes and the texts of a picture."""
    draw_schedule(result, path, "a title")
    svg = path.read_text()
    fills = re.findall(r'<path d="[^"]+" clip-path="[^"]+" style="fill: (#\w+); stroke: #ffffff', svg)
    return fills, re.findall(r"<!-- (.+?) -->", svg)


def as_hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def test_each_action_is_a_box_with_its_micro_batch_and_slice(tmp_path: Path) -> None:
    result = simulated(3, 4, 2)
    fills, texts = drawn(result, tmp_path / "schedule.svg")
    assert fills == [as_hex(_colour(timed)) for timed in result.actions]
    assert len(fills) == 3 * 4 * 2 * 2
    named = [f"{timed.action.micro_batch}.{timed.action.slice_index}" for timed in result.actions]
    others = ["stage 0", "stage 1", "stage 2", "a title", "forward", "backward", "idle", "2.1: micro-batch 2, slice 1"]
    others += ["time (1: the same work without idle time)", "0.0", "0.2"]  # the last two are numbers of the axis
    assert Counter(texts) >= Counter([*named, *others])


def test_narrow_boxes_have_no_text(tmp_path: Path) -> None:
    fills, texts = drawn(simulated(1, 16, 4), tmp_path / "schedule.svg")
    assert len(fills) == 16 * 4 * 2
    assert "15.3" not in texts


def test_colours_tell_passes_micro_batches_and_slices_apart() -> None:
    colours = {
        (timed.action.kind, timed.action.micro_batch, timed.action.slice_index): _colour(timed)
        for timed in simulated(2, 6, 3).actions
    }
    assert len(set(colours.values())) == 2 * 6 * 3
    for micro_batch in range(6):
        for index in range(3):
            forward, backward = colours["F", micro_batch, index], colours["B", micro_batch, index]
            assert sum(forward) > sum(backward)
            assert {ink_on(forward), ink_on(backward)} <= {"white", "#333333"}
        of_forwards = [sum(colours["F", micro_batch, index]) for index in range(3)]
        assert of_forwards == sorted(of_forwards)
