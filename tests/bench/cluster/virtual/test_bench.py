"""Results of an arm: a recording for each speed of the links if its plans follow the costs, and bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.cluster.virtual import bench
from scripts.bench.cluster.virtual.cases import Case
from scripts.bench.cluster.virtual.events import Programs, Step
from scripts.bench.cluster.virtual.recording import Recording
from scripts.bench.cluster.virtual.times import DeviceTimes


@pytest.mark.parametrize("arm", ["ours", "stages", "naive", "static", "hybrid", "dynamic"])
def test_plans_that_follow_costs_are_made_for_each_speed_of_the_links(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = [400, 200, 100] if arm in ("ours", "stages") else [400]
    recorded: list[float] = []

    def run(self: Recording, *_: object) -> Programs:
        recorded.append(self.gbps)
        return Programs([[Step((8192,)), Step((8192,)), Step((4096,))]] * 16, losses=[3.0, 2.0, 1.0])

    monkeypatch.setattr(Recording, "run", run)
    monkeypatch.setattr(bench, "predicted_seconds", lambda folder: [float(len(recorded))] * 2)
    result = bench.run_arm(Recording(tmp_path, DeviceTimes.read("h100"), 3), Case("byted"), arm)
    assert recorded == speeds
    assert result["losses"] == [2.0, 1.0]
    planned = speeds if len(speeds) > 1 else []
    assert result["predicted"] == {str(speed): [number] * 2 for number, speed in enumerate(planned, 1)}
    assert list(result["steps"]) == ["400", "200", "100"]
    assert 0 < result["bounds"][1] < result["bounds"][0]
