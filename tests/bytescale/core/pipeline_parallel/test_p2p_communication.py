"""Errors of a stage when a message to or from a neighbour fails. tests/e2e/hdp tests the contents of messages."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks


def last_words(rank: int, world: int) -> list[str]:
    """Return the errors if a message to the next stage fails, a message from both sides, or something else."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron.bytescale.core.pipeline_parallel.p2p_communication import ShapedP2PCommunicator

    stage = ShapedP2PCommunicator.__new__(ShapedP2PCommunicator)
    stage._clock, stage.prev_rank, stage.next_rank = None, 3, 7
    said = []

    def fails(text: str, **messages: object) -> None:
        def communicate(self: object, **kwargs: object) -> None:
            raise RuntimeError(text)

        P2PCommunicator._communicate = communicate
        kinds = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False, "recv_next": False}
        with pytest.raises(RuntimeError) as found:
            stage._communicate(**{**kinds, **messages})
        said.append(str(found.value))

    fails("Connection closed by peer", tensor_send_next="a tensor")
    fails("Connection closed by peer", recv_prev=True, recv_next=True)
    fails("shapes differ", recv_prev=True)
    return said


@pytest.mark.ranks
def test_a_failed_message_names_the_neighbours() -> None:
    to_next, from_both, other = run_ranks(last_words, 1, init_group=False)[0]
    failed = "the exchange with a neighbouring stage, global rank"
    assert to_next == f"{failed} 7 failed: Connection closed by peer"
    assert from_both == f"{failed}s 3, 7 failed: Connection closed by peer"
    assert other == "shapes differ"
