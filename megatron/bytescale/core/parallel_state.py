"""The HDP ranks: Megatron's dp x cp domain, with one communicator for all rings of all sizes; links between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
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
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = tuple(dist.get_process_group_ranks(group))
    comm = RingComm(_own_groups([mine], timeout_minutes)[mine], hdp_rank(), hdp_size())
    comm.warm_up(device)
    return comm


@dataclass(frozen=True)
class StageLinks:
    """The process groups of this pipeline stage with the stage before and the stage after; None at the ends."""

    before: dist.ProcessGroup | None
    after: dist.ProcessGroup | None


def create_stage_links(timeout_minutes: float) -> StageLinks:
    """Make a process group for each two neighbouring stages. Every process of the job must call it.

    NCCL runs the exchanges of one group one after another, so with the pipeline's own group an input that is not there
    yet would hold up what goes to the other neighbour.
    """
    stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    mine = [pair for pair in pairwise(stages) if dist.get_rank() in pair]
    groups = _own_groups(mine, timeout_minutes)
    before, after = (next((groups[pair] for pair in mine if pair[end] == dist.get_rank()), None) for end in (1, 0))
    return StageLinks(before, after)


def _own_groups(mine: Sequence[tuple[int, ...]], timeout_minutes: float) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The process groups of these ranks; all processes make all groups, each of which its ranks ask for."""
    everyones: list[Sequence[tuple[int, ...]]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    in_order = sorted({ranks for wanted in everyones for ranks in wanted})
    groups = {ranks: dist.new_group(list(ranks), timeout=timedelta(minutes=timeout_minutes)) for ranks in in_order}
    return {ranks: groups[ranks] for ranks in mine}
