"""The picture of a step: boxes, frames of rings, labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.draw.figure import count_text
from bytescale_ext.draw.timeline import (
    _fitting_text,
    _frames,
    draw_timeline,
)
from bytescale_ext.measure.timeline import Phase, PhaseShard, phases_of_plan
from bytescale_ext.plan.cost.cost_model import CostModel
from tests.plan.simple_plans import plan_naive

COST = CostModel(a=0.01, b=1.0)


def test_frames_hold_all_members_of_a_ring() -> None:
    phases = phases_of_plan(plan_naive([70, 30, 5], 4, 20), CostModel(a=0.0, b=1.0))
    frames = {(frame.kind, frame.shard.seq): frame for frame in _frames(phases, 0.0)}
    assert set(frames) == {(kind, seq) for kind in ("forward", "backward") for seq in (0, 1)}
    whole = frames["forward", 0]
    assert whole.rows == {rank: (0.0, pytest.approx(tokens / 3)) for rank, tokens in enumerate((18, 18, 17, 17))}


def rings_out_of_step(num_ranks: int) -> list[Phase]:
    """Return passes of rings of many widths over all ranks. Each rank begins and ends a pass at a different time."""
    generator = np.random.default_rng(0)
    clocks = generator.uniform(0.0, 3.0, num_ranks)
    phases = []
    for step, width in enumerate((40, 30, 12, 8, 4, 3, 3, 2, 1, 60) * 2):
        seq, kind = step % 10, "forward" if step < 10 else "backward"
        for rank in range(num_ranks):
            shard = PhaseShard(seq, 1000 * width, 1000 * width // num_ranks, tuple(range(num_ranks)))
            stop = clocks[rank] + width * generator.uniform(0.9, 1.1)
            phases.append(Phase(0, rank, kind, seq, clocks[rank], stop, (shard,)))
            clocks[rank] = stop
    return phases


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.slow
def test_frames_overlap_no_frame_and_cross_no_label(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr("bytescale_ext.draw.timeline.save", lambda figure, path: figures.append(figure))
    draw_timeline(rings_out_of_step(num_ranks), tmp_path / "none.png", "rings")
    (figure,) = figures
    figure.canvas.draw()
    (axes,) = figure.axes
    frames = [patch for patch in axes.patches if patch.get_facecolor()[3] == 0]
    assert len(frames) > 10
    rows, times = np.mgrid[-0.5 : num_ranks - 0.5 : 0.093, 0.0:350.0:0.437]
    points = np.stack([times.ravel(), rows.ravel()], axis=1)
    assert sum(frame.get_path().contains_points(points).astype(int) for frame in frames).max() == 1
    labels = [label.get_window_extent() for label in axes.texts if label.get_text()]
    assert len(labels) > 5
    for frame in frames:
        edge = frame.get_transform().transform_path(frame.get_path())
        assert not any(edge.intersects_bbox(label, filled=False) for label in labels)


def test_labels_fit_or_are_left_out() -> None:
    texts = ("doc 12\n40K on 8", "doc 12", "12")
    assert _fitting_text(texts, 2.0, 1.0) == texts[0]
    assert _fitting_text(texts, 2.0, 0.2) == texts[1]
    assert _fitting_text(texts, 0.3, 0.2) == texts[2]
    assert _fitting_text(texts, 0.1, 0.2) == ""
    assert [count_text(count) for count in (800, 1024, 40_000, 1 << 21)] == ["800", "1K", "39.1K", "2M"]
