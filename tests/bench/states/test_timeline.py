"""The benchmark of a step's timeline: a link's copies end when they would, and the step waits for them."""

from __future__ import annotations

import json
import time

import pytest
import torch

from bytescale_ext.activation.arena import HostArena
from scripts.bench.states import timeline
from scripts.bench.states.timeline import Clock, SlowLink, TimedArm


def test_copies_in_one_direction_follow_each_other() -> None:
    clock = Clock(is_wall=False)
    link = SlowLink(HostArena(torch.empty(0, dtype=torch.uint8)), clock=clock, bytes_per_second=1000.0)
    here, there = torch.zeros(250), torch.ones(250)  # a second
    begun = clock.now()
    first, second, back = (
        link.write([(here, there)], []),
        link.write([(here, there)], []),
        link.read([(there, here)], 0),
    )
    assert torch.equal(here, torch.ones(250))
    assert first.moment - begun == pytest.approx(1, abs=0.1)
    assert second.moment - first.moment == pytest.approx(1)
    assert back.moment - begun == pytest.approx(1, abs=0.1)
    link.wait(second)
    assert clock.now() - begun == pytest.approx(2, abs=0.1)
    link.wait(first)  # is done
    assert clock.now() - begun == pytest.approx(2, abs=0.1)


def test_a_wall_clock_sleeps() -> None:
    clock, begun = Clock(is_wall=True), time.perf_counter()
    clock.wait_until(clock.now() + 0.05)
    assert time.perf_counter() - begun >= 0.05


def test_a_slow_link_sets_the_time_of_a_step_and_not_its_results() -> None:
    clock = Clock(is_wall=False)
    arms = [TimedArm(100_000, 1 << 16, clock) for _ in range(2)]
    fast, slow = arms[0].timed_step(), arms[1].timed_step(1e6)  # 400 kB to the host
    assert slow >= 0.4
    assert slow > fast
    assert all(map(torch.equal, arms[0].model, arms[1].model))


def test_it_prints_each_speed(capsys: pytest.CaptureFixture[str]) -> None:
    timeline.main(["--parameters", "1e5", "--page-mb", "0.0625", "--repeats", "2", "--json"])
    first, second, figures = capsys.readouterr().out.strip().splitlines()
    assert "(1 of the first)" in first
    assert "(0.1 of the first)" in second
    rows = json.loads(figures)
    assert [row["share"] for row in rows] == [1.0, 0.1]
    assert all(row["measured_seconds"] > 0 for row in rows)
    assert rows[1]["predicted_seconds"] > rows[0]["predicted_seconds"]
