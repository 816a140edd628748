"""Virtual ranks in one process: turns, deadlocks and messages of the wrong shape."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.attention.backend import Exchanges
from bytescale_ext.attention.virtual import MailboxComm, mailbox_comms, run_in_turn


def pass_on(comm: MailboxComm, size: int) -> Exchanges[int]:
    """Send every rank's number around all ranks, and return the sum that this rank received."""
    held, total = torch.tensor([float(comm.rank)]), 0
    for _ in range(size):
        total += int(held)
        received = torch.empty_like(held)
        yield comm.exchange([(held, (comm.rank + 1) % size)], [(received, (comm.rank - 1) % size)])
        held = received
    return total


def receive_first(comm: MailboxComm, peer: int) -> Exchanges[None]:
    received = torch.empty(1)
    yield comm.exchange([], [(received, peer)])
    yield comm.exchange([(received, peer)], [])


def send(comm: MailboxComm, peer: int, tensor: torch.Tensor) -> Exchanges[None]:
    yield comm.exchange([(tensor, peer)], [])


def receive(comm: MailboxComm, peer: int, tensor: torch.Tensor) -> Exchanges[torch.Tensor]:
    yield comm.exchange([], [(tensor, peer)])
    return tensor


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_take_turns(size: int) -> None:
    comms = mailbox_comms(size)
    assert run_in_turn([pass_on(comm, size) for comm in comms]) == [sum(range(size))] * size
    assert [comm.stats.bytes_sent for comm in comms] == [4 * size] * size


def test_a_deadlock_is_an_error() -> None:
    first, second = mailbox_comms(2)
    with pytest.raises(RuntimeError, match=r"deadlock: virtual ranks \[0, 1\]"):
        run_in_turn([receive_first(first, 1), receive_first(second, 0)])


def test_a_deadlock_names_only_the_ranks_that_wait() -> None:
    first, second, third = mailbox_comms(3)
    steps = [send(first, 2, torch.zeros(1)), receive_first(second, 0), receive(third, 0, torch.empty(1))]
    with pytest.raises(RuntimeError, match=r"deadlock: virtual ranks \[1\] wait for messages that no rank will send"):
        run_in_turn(steps)


def test_results_come_in_the_order_of_ranks() -> None:
    """Rank 0 waits for rank 2, which ends first."""
    first, second, third = mailbox_comms(3)
    received = [torch.empty(1), torch.empty(1)]
    steps = [receive(first, 1, received[0]), relay(second, 2, 0, received[1]), send(third, 1, torch.full((1,), 7.0))]
    assert [None if one is None else float(one) for one in run_in_turn(steps)] == [7.0, 7.0, None]


def relay(comm: MailboxComm, source: int, target: int, tensor: torch.Tensor) -> Exchanges[torch.Tensor]:
    yield comm.exchange([], [(tensor, source)])
    yield comm.exchange([(tensor, target)], [])
    return tensor


@pytest.mark.parametrize("received", [torch.empty(3), torch.empty(2, dtype=torch.float64)])
def test_a_message_of_another_shape_or_dtype_is_an_error(received: torch.Tensor) -> None:
    first, second = mailbox_comms(2)
    with pytest.raises(RuntimeError, match=r"virtual rank 1 expected .* from rank 0, got \(2,\) torch.float32"):
        run_in_turn([send(first, 1, torch.zeros(2)), receive(second, 0, received)])


def test_messages_meet_receives_in_the_order_of_posting() -> None:
    first, second = mailbox_comms(2)
    one, two = torch.empty(1), torch.empty(1)
    pending = second.exchange([], [(one, 0)]), second.exchange([], [(two, 0)])
    first.exchange([(torch.tensor([1.0]), 1)], [])
    first.exchange([(torch.tensor([2.0]), 1)], [])
    pending[1].wait()
    pending[0].wait()
    assert (float(one), float(two)) == (1.0, 2.0)


def test_empty_tensors_are_not_sent() -> None:
    first, second = mailbox_comms(2)
    first.exchange([(torch.empty(0), 1)], []).wait()
    pending = second.exchange([], [(torch.empty(0), 0)])
    assert pending.ready()
    assert first.stats.num_exchanges == 0
