"""The HDP ranks: Megatron's dp x cp domain, with one communicator for all rings of all sizes."""

from __future__ import annotations

from datetime import timedelta

import torch
from megatron.core import parallel_state

from bytescale_ext.parallel.p2p import RingComm


def hdp_rank() -> int:
    """This process's rank among the HDP ranks."""
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def hdp_size() -> int:
    """How many HDP ranks there are."""
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def create_ring_comm(device: torch.device, timeout_minutes: float) -> RingComm:
    """Make this rank's ring communicator and warm it up. Every process of the job must call it.

    It has a process group of its own: rings run while gradients are reduced on Megatron's data-parallel group,
    and on one communicator a ring would queue behind a reduction that waits for that very ring.
    """
    mine = torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    everyones: list[list[int]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyones, mine)
    own = None
    for ranks in sorted({tuple(ranks) for ranks in everyones}):
        group = torch.distributed.new_group(list(ranks), timeout=timedelta(minutes=timeout_minutes))
        if ranks == tuple(mine):
            own = group
    comm = RingComm(own, hdp_rank(), hdp_size())
    comm.warm_up(device)
    return comm
