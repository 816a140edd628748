"""The last line of a rank that loses a peer: the step, the message or collective, its peers, and what to look at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from bytescale_ext.parallel.faults import PeerLost, describe, is_of_peers


@contextlib.contextmanager
def named_faults() -> Iterator[None]:
    """Turn what ``torch.distributed`` raises about a peer into a ``PeerLost`` that says what failed, and when."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_peers(error):
            raise
        raise PeerLost(f"{_when()}: {describe(error)}. {_advice()}") from error


def _when() -> str:
    from megatron.training import get_args

    done = getattr(get_args(), "curr_iteration", None)
    step = "before the first step" if done is None else f"step {done + 1}"
    return f"rank {dist.get_rank()}, {step}" if dist.is_initialized() else step


def _advice() -> str:
    from megatron.training import get_args

    minutes = get_args().distributed_timeout_minutes
    return (
        "A rank has ended or hangs, or the network to it is cut: the log that ended first has the cause. If none did, "
        f"look at the hosts and links of the other ranks; one that is silent for {minutes} minutes "
        "(--distributed-timeout-minutes) ends all"
    )
