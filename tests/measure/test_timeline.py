from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.measure.timeline import (
    Phase,
    PhaseShard,
    phases_of_plan,
    rank_times,
    read_phases,
    write_perfetto,
)
from bytescale_ext.plan.cost.cost_model import CostModel
from tests.plan.simple_plans import plan_naive

EVENT: dict[str, Any] = {
    "step": 12,
    "rank": 0,
    "kind": "forward",
    "micro_batch": 0,
    "start": 1.5,
    "stop": 2.0,
    "shards": [{"seq": 3, "length": 5120, "tokens": 2560, "ring": [0, 1]}],
}
REDUCE: dict[str, Any] = {"step": 12, "rank": 0, "kind": "reduce", "micro_batch": None, "start": 3.0, "stop": 3.5}


def write_ranks(directory: Path, *ranks: list[dict[str, Any]]) -> None:
    for rank, events in enumerate(ranks):
        lines = "".join(json.dumps({**event, "rank": rank}) + "\n" for event in events)
        (directory / f"rank{rank}.jsonl").write_text(lines)


def test_read_one_event_of_each_form(tmp_path: Path) -> None:
    write_ranks(tmp_path, [EVENT, REDUCE])
    assert read_phases(tmp_path) == (
        Phase(12, 0, "forward", 0, 1.5, 2.0, (PhaseShard(3, 5120, 2560, (0, 1)),)),
        Phase(12, 0, "reduce", None, 3.0, 3.5),
    )


def test_the_latest_step_that_all_ranks_have(tmp_path: Path) -> None:
    write_ranks(
        tmp_path, [{**REDUCE, "step": step} for step in (1, 2, 3)], [{**REDUCE, "step": step} for step in (1, 2)]
    )
    assert {phase.step for phase in read_phases(tmp_path)} == {2}
    assert {(phase.step, phase.rank) for phase in read_phases(tmp_path, step=1)} == {(1, 0), (1, 1)}
    with pytest.raises(ValueError, match=r"step 3 has no phases of ranks \[1\].*steps 1 to 2"):
        read_phases(tmp_path, step=3)


def test_no_common_step(tmp_path: Path) -> None:
    write_ranks(tmp_path, [{**REDUCE, "step": 1}], [])
    with pytest.raises(ValueError, match=r"no step in .* has phases of all 2 ranks"):
        read_phases(tmp_path)
    with pytest.raises(ValueError, match="no step is complete"):
        read_phases(tmp_path, step=1)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        read_phases(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"contains no rank0.jsonl"):
        read_phases(tmp_path)
    write_ranks(tmp_path, [REDUCE], [REDUCE], [REDUCE])
    (tmp_path / "rank1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has rank2.jsonl but no files of ranks \[1\]"):
        read_phases(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2 is not a phase"),
        ("[1, 2]", "line 2 is not a phase"),
        (json.dumps({**REDUCE, "kind": "sleep"}), "kind 'sleep' is not one of"),
        (json.dumps({**REDUCE, "start": 4.0}), "start 4.0 is after stop 3.5"),
        (json.dumps({**REDUCE, "start": "NaN"}), '"NaN" is not a number'),
        (json.dumps({**REDUCE, "step": True}), "true is not a whole number"),
        (json.dumps({key: value for key, value in REDUCE.items() if key != "stop"}), "KeyError: 'stop'"),
        (json.dumps({**EVENT, "shards": [{"seq": 1}]}), "KeyError: 'length'"),
        (json.dumps({**EVENT, "shards": [{"seq": 1, "length": 2, "tokens": 0, "ring": [0]}]}), "no tokens"),
        (json.dumps({**REDUCE, "rank": 1}), "line 2 is a phase of rank 1"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "rank0.jsonl").write_text(json.dumps(REDUCE) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=words):
        read_phases(tmp_path)


def test_phases_of_a_plan() -> None:
    plan = plan_naive([6, 3], 2, 4)
    phases = phases_of_plan(plan, CostModel(a=0.0, b=1.0), step=5)
    ring = (PhaseShard(0, 6, 3, (0, 1)),)
    assert phases == (
        Phase(5, 0, "forward", 0, 0.0, 1.0, ring),
        Phase(5, 0, "backward", 0, 1.0, 3.0, ring),
        Phase(5, 0, "forward", 1, 3.0, 4.0, (PhaseShard(1, 3, 3, (0,)),)),
        Phase(5, 0, "backward", 1, 4.0, 6.0, (PhaseShard(1, 3, 3, (0,)),)),
        Phase(5, 1, "forward", 0, 0.0, 1.0, ring),
        Phase(5, 1, "backward", 0, 1.0, 3.0, ring),
    )
    times = rank_times(phases)
    assert [(time.busy, time.finish, time.busy_share) for time in times] == [(6.0, 6.0, 1.0), (3.0, 3.0, 0.5)]


def test_rank_times_count_computing_only() -> None:
    phases = [
        Phase(1, 0, "forward", 0, 10.0, 12.0),
        Phase(1, 0, "wait", None, 12.0, 14.0),
        Phase(1, 0, "backward", 0, 14.0, 15.0),
        Phase(1, 0, "reduce", None, 15.0, 20.0),
        Phase(1, 2, "optimizer", None, 15.0, 20.0),
    ]
    times = rank_times(phases, 4)
    assert [time.busy for time in times] == [3.0, 0.0, 0.0, 0.0]
    assert [time.finish for time in times] == [5.0, 0.0, 0.0, 0.0]
    assert [time.busy_share for time in times] == [0.6, 0.0, 0.0, 0.0]
    assert rank_times([]) == ()


def read_trace(phases: tuple[Phase, ...], path: Path) -> list[dict[str, Any]]:
    write_perfetto(phases, path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_perfetto_names_ranks_and_counts_microseconds(tmp_path: Path) -> None:
    write_ranks(tmp_path, [EVENT, REDUCE], [EVENT, REDUCE])
    events = read_trace(read_phases(tmp_path), tmp_path / "trace.json")
    names = {event["name"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"process_name": "HDP ranks"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {0: "rank 0", 1: "rank 1"}
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [
        ("forward 0", 0.0, 500_000.0),
        ("seq 3", 0.0, 500_000.0),
        ("reduce", 1_500_000.0, 500_000.0),
    ]
    assert slices[1]["args"] == {"sequence": 3, "length": 5120, "tokens": 2560, "ring": [0, 1]}


def test_perfetto_flows_join_each_ring_and_never_point_back(tmp_path: Path) -> None:
    plan = plan_naive([70, 30, 5, 4, 9], 4, 20)
    events = read_trace(phases_of_plan(plan, CostModel(a=1e-3, b=0.013, g=0.1)), tmp_path / "trace.json")
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    # sequence 0 on 4 ranks and sequence 1 on 2: 3 + 1 arrows, forward and backward
    assert len(begins) == len(ends) == 8
    assert set(begins) == set(ends)
    slices = [event for event in events if event["ph"] == "X" and event["args"]]
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert begin["tid"] != end["tid"]
        assert begin["name"] == end["name"]
        for flow in (begin, end):
            assert any(
                event["tid"] == flow["tid"]
                and event["cat"] == flow["cat"]
                and event["ts"] <= flow["ts"] < event["ts"] + event["dur"]
                and flow["name"] == f"ring of seq {event['args']['sequence']}"
                for event in slices
            )


def test_perfetto_shards_lie_inside_their_phase(tmp_path: Path) -> None:
    plan = plan_naive([7, 6, 5, 4, 3, 2, 1] * 5, 2, 20)
    events = read_trace(phases_of_plan(plan, CostModel(a=1e-7, b=1.3e-6, g=1e-6)), tmp_path / "trace.json")
    outer: dict[str, Any] = {}
    for event in (event for event in events if event["ph"] == "X"):
        if not event["args"]:
            outer = event
            continue
        assert outer["tid"] == event["tid"]
        assert outer["ts"] <= event["ts"]
        assert round(event["ts"] + event["dur"], 3) <= round(outer["ts"] + outer["dur"], 3)
