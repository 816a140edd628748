"""Times that follow from first principles: one rank, two ranks, overlap, the sharing of links, and determinism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from scripts.bench.cluster.virtual.events import Begin, Collective, End, Event, HostWait, Work
from scripts.bench.cluster.virtual.times import HostTimes, planned_cost
from tests.bench.cluster.virtual.samples import (
    DEVICE,
    NETWORK_BYTES,
    NODE_BYTES,
    attention,
    exchange,
    layer,
    step_of,
    times_of,
    waits,
)

TOKENS = 512  # recorded; 16,384 modelled
NUMBERS = 2 * 16 * TOKENS  # keys and values of one recorded head
KEYS_BYTES = 2.0 * 2 * 8 * 128 * TOKENS * 32  # in bf16, of the model


def kernel(tokens: int, keys: int = 0, is_backward: bool = False) -> float:
    return times_of().seconds(attention(tokens, is_backward, keys))


def test_a_step_of_one_rank_is_the_sum_of_its_kernels() -> None:
    head = [Work("head", False, TOKENS), Work("head", True, TOKENS)]
    optimizer = Work("optimizer", False, 0)
    events = [*layer(TOKENS), *head, *layer(TOKENS, True), HostWait(), optimizer]
    device = replace(DEVICE, memory_bytes=3e12)
    step = step_of(events, times=times_of(device))
    modelled, width = TOKENS * 32, 4096
    weights = width * (32 * 128 + 2 * 8 * 128) + width**2 + 3 * width * 11008
    linear = 3 * 2 * (32 * weights + width * 32000) * modelled / 600e12
    attentions = 32 * (1 + 2.5) * 2 * width * modelled**2 / 400e12
    update = (32 * weights + 2 * width * 32000) / 64 * 30 / 3e12
    assert step.seconds == pytest.approx(linear + attentions + update, rel=0.02)
    assert step.by_kind["attention"] == pytest.approx(attentions, rel=0.02)
    assert step.by_kind["waiting"] == step.by_kind["exchange"] == step.by_kind["launch"] == 0


def test_one_launch_of_a_pack_takes_one_start() -> None:
    times = times_of(replace(DEVICE, attention_start=1e-3))
    pack = Work("attention", False, 200, 200, ((100, 100), (100, 100)), True)
    one = attention(100)
    assert times.seconds(pack) - 1e-3 == pytest.approx(2 * (times.seconds(one) - 1e-3))


@pytest.mark.parametrize(("peers", "rate"), [(1, NODE_BYTES), (8, NETWORK_BYTES)])
def test_an_exchange_of_two_ranks_takes_its_bytes_over_the_bandwidth(peers: int, rate: float) -> None:
    events = {rank: [*(), exchange(1, other, other, NUMBERS), *waits(1)] for rank, other in ((0, peers), (peers, 0))}
    ranks: list[list[Event]] = [events.get(rank, []) for rank in range(peers + 1)]
    step = step_of(*ranks)
    assert step.seconds == pytest.approx(KEYS_BYTES / rate, rel=0.05)
    both = step.by_kind["exchange"] * (peers + 1)
    assert both == pytest.approx(2 * KEYS_BYTES / rate, rel=0.05)


def two_ranks(tokens: int) -> list[list[Event]]:
    """Return a layer with a ring of two ranks: own triangle while keys travel, then the keys of the other rank."""
    return [
        [
            Begin(False), exchange(1, other, other, NUMBERS), attention(tokens), *waits(1),
            attention(tokens, keys=TOKENS), End(),
        ]
        for other in (8, 0)
    ]  # fmt: skip


def ring_of(tokens: int) -> list[list[Event]]:
    first, last = two_ranks(tokens)
    return [first, *[[]] * 7, last]


def test_an_exchange_that_is_shorter_than_its_block_is_hidden() -> None:
    step = step_of(*ring_of(4096), times=times_of(repeats=2))
    assert kernel(4096) > KEYS_BYTES / NETWORK_BYTES
    assert step.seconds == pytest.approx(2 * (kernel(4096) + kernel(4096, TOKENS)), rel=0.01)
    assert step.by_kind["exchange"] == 0


def test_an_exchange_that_is_longer_than_its_block_is_exposed() -> None:
    step = step_of(*ring_of(64), times=times_of(repeats=2))
    sent = KEYS_BYTES / NETWORK_BYTES
    assert kernel(64) < sent
    assert step.seconds == pytest.approx(2 * (sent + kernel(64, TOKENS)), rel=0.01)
    assert step.by_kind["exchange"] * 9 == pytest.approx(2 * 2 * (sent - kernel(64)), rel=0.01)


def test_a_rank_waits_for_the_rank_that_posts_later() -> None:
    first, last = two_ranks(64)
    late = kernel(8192)
    step = step_of(first, *[[]] * 7, [attention(8192), *last], times=times_of(repeats=1))
    sent = KEYS_BYTES / NETWORK_BYTES
    assert step.seconds == pytest.approx(late + sent + kernel(64, TOKENS), rel=0.01)
    assert step.by_kind["waiting"] * 9 == pytest.approx(late - kernel(64), rel=0.01)


def test_two_messages_that_share_a_link_take_twice_as_long() -> None:
    ranks: list[list[Event]] = [[] for _ in range(10)]
    for rank, other in ((0, 8), (1, 8)):  # both send to process 8 and receive from it
        ranks[rank] = [exchange(1, other, other, NUMBERS)._replace(communicator=f"pair {rank}"), *waits(1)]
    ranks[8] = [
        *(exchange(2 + peer, peer, peer, NUMBERS)._replace(communicator=f"pair {peer}") for peer in (0, 1)),
        *waits(2, 3),
    ]
    assert step_of(*ranks).seconds == pytest.approx(2 * KEYS_BYTES / NETWORK_BYTES, rel=0.05)


def test_messages_of_one_communicator_run_one_after_the_other() -> None:
    events = [[exchange(1, other, other, NUMBERS), exchange(2, other, other, NUMBERS), *waits(2)] for other in (1, 0)]
    assert step_of(*events).seconds == pytest.approx(2 * KEYS_BYTES / NODE_BYTES, rel=0.05)


def test_a_reduction_over_nodes_uses_the_links_of_all_their_devices() -> None:
    numbers = 1000
    reduce = Collective(1, "all", "reduce", tuple(range(16)), numbers)
    times = times_of()
    step = step_of(*[[reduce, *waits(1)]] * 16, times=times)
    size = times.collective_bytes("reduce", numbers, 0)
    slower = max(size * 15 / 16 / 8 / NETWORK_BYTES, size * 15 / 16 * 7 / 8 / NODE_BYTES)
    assert step.seconds == pytest.approx(slower, rel=0.01)
    assert step.by_kind["reduction"] == pytest.approx(slower, rel=0.01)


def test_a_device_waits_for_a_host_that_is_slower() -> None:
    host = HostTimes(0.01, 0.002)
    blocks: list[Event] = [attention(8), attention(8, keys=8), attention(8, keys=8)]
    events: list[Event] = [Begin(False), Work("before", False, 8), *blocks, Work("after", False, 8), End()]
    step = step_of(events, times=times_of(host=host))
    assert step.seconds == pytest.approx(32 * (0.01 + 2 * 0.002), rel=0.01)
    assert step.by_kind["launch"] == pytest.approx(step.seconds, rel=0.05)


def test_a_replay_is_the_same_to_the_last_digit() -> None:
    assert step_of(*ring_of(700)).seconds.hex() == step_of(*ring_of(700)).seconds.hex()


def test_ranks_that_wait_for_each_other_forever_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="wait forever"):
        step_of([exchange(1, 1, 1, 8), *waits(1)], [])


def test_a_step_is_the_simulators_step() -> None:
    """Two ranks share a document, and then each computes a document of its own."""
    lengths, rings = (2 * TOKENS, TOKENS, TOKENS), ((0, 1), (0,), (1,))
    plan = StepPlan(2, TOKENS, lengths, tuple(micro_batches(rank, lengths, rings) for rank in (0, 1)))
    cost = planned_cost(times_of(), NODE_BYTES)
    layers = replace(cost, head_forward=0.0, head_backward=0.0).whole().both
    local = [*layer(TOKENS), *layer(TOKENS, True)]
    step = step_of(*([*ring_layer(rank), *ring_layer(rank, is_backward=True), *local] for rank in (0, 1)))
    assert step.seconds == pytest.approx(replay(plan, layers).makespan, rel=0.05)


def micro_batches(rank: int, lengths: Sequence[int], rings: Sequence[tuple[int, ...]]) -> tuple[MicroBatch, ...]:
    """Return a micro-batch for each document of a rank."""
    return tuple(
        MicroBatch((Shard(seq, tuple(zigzag_ranges(lengths[seq], len(ring), ring.index(rank))), ring),))
        for seq, ring in enumerate(rings)
        if rank in ring
    )


def ring_layer(rank: int, is_backward: bool = False) -> list[Event]:
    """Return a layer of a document of two ranks: the own triangle, then the keys of the other rank."""
    other, half = 1 - rank, TOKENS // 2
    queries, keys = (half, TOKENS) if rank == 0 else (TOKENS, half)
    first, last = ("after", "before") if is_backward else ("before", "after")
    blocks: list[Event] = [exchange(1, other, other, NUMBERS), attention(TOKENS, is_backward), *waits(1)]
    blocks.append(attention(queries, is_backward, keys))
    if is_backward:
        blocks += [exchange(2, other, other, NUMBERS, "sums"), *waits(2)]
    return [Begin(is_backward), Work(first, is_backward, TOKENS), *blocks, Work(last, is_backward, TOKENS), End()]
