"""The replay of NCCL's order finds runs that cannot end. Traces are written by hand; no process is started."""

from __future__ import annotations

from tests.ghost.order import Hosts, HostWait, Place, Replay, Step, only_step, parse, places_of_step, stuck_runs

INIT = ["INIT ring 0 2", "INIT shards 0 2"]


def exchange(ticket: int, member: int) -> str:
    """A ring exchange with the other member."""
    return f"POST {ticket} ring 1 {member} 2 send:{1 - member}:64 recv:{1 - member}:64"


def reduction(ticket: int, member: int) -> str:
    """A reduction that overlaps with computation, on its own stream."""
    return f"POST {ticket} shards 2 {member} 2 reduce_scatter:0:256"


def traces(first: list[str], second: list[str]) -> dict[int, list]:
    return {rank: parse([*INIT, "STEP 1", *lines]) for rank, lines in enumerate((first, second))}


def wait(ticket: int) -> str:
    return f"STREAM_WAIT 0 {ticket}"


# Rank 0 starts its reduction before the last exchange of the ring, rank 1 after it.
CROSSED = traces(
    [reduction(1, 0), exchange(2, 0), wait(2), wait(1)],
    [exchange(1, 1), wait(1), reduction(2, 1), wait(2)],
)
ORDERED = traces(
    [exchange(1, 0), wait(1), reduction(2, 0), wait(2)],
    [exchange(1, 1), wait(1), reduction(2, 1), wait(2)],
)


def test_equal_orders_end_under_every_model() -> None:
    assert stuck_runs(ORDERED, step=1) == []


def test_crossed_orders_end_while_hosts_go_on() -> None:
    """Both communicators run at the same time, so the crossing alone is no fault."""
    assert Replay(CROSSED).stuck == []
    assert Replay(CROSSED, Hosts.AT_STREAM_WAITS).stuck == []


def test_a_device_wait_between_crossed_operations_is_found() -> None:
    """Rank 0 waits for the reduction, which rank 1 posts after the exchange that rank 0 has not posted."""
    place = next(one for one in places_of_step(CROSSED, 1) if one.rank == 0)
    stuck = Replay(CROSSED, device_wait=place).stuck
    assert len(stuck) == 2
    assert "rank 0 in a wait for its device" in stuck[0]
    assert "reduce_scatter" in stuck[0]
    assert "send:0:64" in stuck[1]
    assert any("device wait at Place(rank=0" in line for line in stuck_runs(CROSSED, step=1))


def test_a_wait_at_each_stream_wait_is_found() -> None:
    """Rank 0 waits for its reduction before it posts the exchange that rank 1 waits for."""
    crossed = traces(
        [reduction(1, 0), wait(1), exchange(2, 0)],
        [exchange(1, 1), wait(1), reduction(2, 1)],
    )
    assert len(Replay(crossed, Hosts.AT_STREAM_WAITS).stuck) == 2
    # Even if hosts go on, the exchange of rank 0 follows kernels that follow the reduction.
    assert len(Replay(crossed).stuck) == 2


def test_communicators_made_in_different_orders_are_found() -> None:
    made = {0: parse(["INIT a 0 2", "INIT b 0 2"]), 1: parse(["INIT b 1 2", "INIT a 1 2"])}
    assert len(Replay(made).stuck) == 2


def test_a_missing_message_is_found() -> None:
    assert len(Replay(traces([exchange(1, 0)], [])).stuck) == 2


def test_groups_of_different_shapes_match() -> None:
    """One group of two sends meets two receives in groups of their own."""
    sends = ["POST 1 ring 1 0 2 send:1:8 send:1:8"]
    receives = ["POST 1 ring 1 1 2 recv:0:8", "POST 2 ring 1 1 2 recv:0:8"]
    assert Replay(traces(sends, receives)).stuck == []


def test_messages_to_oneself_match() -> None:
    group = "recv:0:8 send:0:8 send:1:8 recv:1:8"
    both = [[f"POST 1 ring 1 {member} 2 {group}"] for member in range(2)]
    assert Replay(traces(*both)).stuck == []


def test_waits_of_the_host_in_a_trace() -> None:
    waits = ["HOST_WAIT stream 1", "HOST_WAIT event 1", "HOST_WAIT event 0", "DEVICE_WAIT cudaFree", "MALLOC 8"]
    assert Replay(traces([exchange(1, 0), *waits], [exchange(1, 1), *waits])).stuck == []
    assert len(Replay(traces([reduction(1, 0), "HOST_WAIT event 1", exchange(2, 0)],
                             [exchange(1, 1), "HOST_WAIT stream 1", reduction(2, 1)])).stuck) == 2  # fmt: skip


def test_collectives_after_messages_of_some_ranks() -> None:
    """A rank without a ring posts fewer operations; collectives still meet in their order."""
    alone = "POST 1 ring 1 0 2 send:0:8 recv:0:8"
    together = ["POST 2 ring 1 {} 2 all_reduce:0:8", "HOST_WAIT event 2", "STEP 2", "POST 3 ring 1 {} 2 all_reduce:0:8"]
    lines = [[line.format(member) for line in together] for member in range(2)]
    run = traces([alone, *lines[0]], lines[1])
    assert Replay(run).stuck == []
    assert stuck_runs(run, step=2) == []


def test_one_step_of_a_run() -> None:
    """A step begins when the operations before it have ended, so waits for them end, too."""
    run = traces(
        [exchange(1, 0), "STEP 2", wait(1), exchange(2, 0), wait(2)],
        [exchange(1, 1), "STEP 2", wait(1), exchange(2, 1)],
    )
    step = only_step(run, 2)
    assert [len(events) for events in step.values()] == [4, 3]
    assert Replay(step, Hosts.AT_STREAM_WAITS).stuck == []
    assert stuck_runs(run, step=2) == []


def test_places_of_waits() -> None:
    events = parse(["AT loss.py:3", "HOST_WAIT stream 0", "DEVICE_WAIT cudaFree"])
    assert events == [HostWait(stream=0, place="loss.py:3"), HostWait()]


def test_places_are_the_operations_of_a_step() -> None:
    two = {0: parse([*INIT, "STEP 1", exchange(1, 0), "STEP 2", reduction(2, 0), wait(2)])}
    assert two[0][4] == Step(2)
    assert places_of_step(two, 1) == [Place(0, 3)]
    assert places_of_step(two, 2) == [Place(0, 5)]
