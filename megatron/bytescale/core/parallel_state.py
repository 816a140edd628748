"""Process groups of HDP: one communicator for rings of all sizes, and links between pipeline stages.

The HDP ranks are Megatron's dp x cp domain.

NCCL creates the communicator of a group in the first call of the group, and all members wait there for each other. In a
step, where ranks run their passes in different orders, such waits can deadlock. So all communicators of a step are
created before the first step, in the same order on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from bytescale_ext.parallel.p2p import RingComm
from megatron.bytescale.arguments.layer_settings import Balancing


def hdp_rank() -> int:
    """Return this process's rank among the HDP ranks."""
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def hdp_size() -> int:
    """Return the number of HDP ranks."""
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def hdp_group() -> dist.ProcessGroup:
    """Return Megatron's process group of the HDP ranks."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def create_ring_comm(device: torch.device, timeout_minutes: float) -> RingComm:
    """Create this rank's ring communicator and warm it up. Every process of the job must call it.

    It has its own process group, because rings run while gradients are reduced on Megatron's data-parallel group. On
    one shared communicator a ring would queue behind a reduction that waits for this same ring.
    """
    mine = tuple(dist.get_process_group_ranks(hdp_group()))
    comm = RingComm(own_groups("RINGS", [mine], device, timeout_minutes)[mine], hdp_rank(), hdp_size())
    comm.warm_up(device)
    return comm


@dataclass(frozen=True)
class StageLinks:
    """Process groups of this pipeline stage with the previous and the next stage; None at the pipeline's ends."""

    before: dist.ProcessGroup | None
    after: dist.ProcessGroup | None


def create_stage_links(device: torch.device, timeout_minutes: float) -> StageLinks:
    """Create a process group for each pair of neighbouring stages. Every process of the job must call it.

    NCCL runs the exchanges of one group in order. On the pipeline's own group, a missing input would therefore delay
    messages to the other neighbour.
    """
    stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    mine = [pair for pair in itertools.pairwise(stages) if dist.get_rank() in pair]
    groups = own_groups("STAGE_LINK", mine, device, timeout_minutes)
    for pair in mine:
        for link in (pair, pair[::-1]):
            _send_first(link, groups[pair], device)
    before, after = (next((groups[pair] for pair in mine if pair[end] == dist.get_rank()), None) for end in (1, 0))
    return StageLinks(before, after)


@dataclass(frozen=True)
class VirtualLinks:
    """Process groups of a stage with virtual stages: one for each neighbour and direction of messages.

    Outputs go around all stages: the last stage sends to the first stage, for the first stage's next chunk.

    Attributes:
        outputs_in, outputs_out: groups for outputs from the previous stage and to the next stage.
        gradients_in, gradients_out: groups for gradients from the next stage and to the previous stage.
    """

    outputs_in: dist.ProcessGroup
    outputs_out: dist.ProcessGroup
    gradients_in: dist.ProcessGroup
    gradients_out: dist.ProcessGroup


def create_virtual_links(device: torch.device, timeout_minutes: float) -> VirtualLinks:
    """Create a process group for each direction of each pair of neighbouring stages. Every process must call it.

    NCCL runs the messages of one group in order, so a receive posted ahead would delay messages in the other direction.
    Each link transfers a first message here, because NCCL connects on the first message and both ends wait for it.
    """
    stages = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    mine, groups_of_links = dist.get_rank(), []
    for around in (stages, stages[::-1]):  # outputs, gradients
        links = [link for link in zip(around, [*around[1:], around[0]], strict=True) if mine in link]
        groups = own_groups("STAGE_LINK", links, device, timeout_minutes)
        for link in sorted(links):  # the same order on all processes
            _send_first(link, groups[link], device)
        groups_of_links += [next(groups[link] for link in links if link[end] == mine) for end in (1, 0)]
    return VirtualLinks(*groups_of_links)


def _send_first(link: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> None:
    """Send a number from the first rank of a link to the second, which connects them. Both ranks call it."""
    source, target = link
    act, other = (dist.isend, target) if dist.get_rank() == source else (dist.irecv, source)
    for work in dist.batch_isend_irecv([dist.P2POp(act, torch.zeros(1, device=device), other, group)]):
        work.wait()


def connect(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Create the communicators of groups. Each group's members call it; common groups have the same order on all."""
    if device.type == "cuda":  # gloo connects when a group is made
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def connect_stages(device: torch.device) -> None:
    """Connect neighbouring stages, the last and the first too, for messages that Megatron sends one by one.

    NCCL has a communicator for each pair of ranks and group then. With two stages Megatron takes the group of all
    processes for one of the two directions. The members of a pipeline call it together.
    """
    if device.type != "cuda":
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(group)
    used = (group, dist.group.WORLD) if len(stages) == 2 else (group,)
    number, mine = torch.zeros(1, device=device), dist.get_rank()
    pairs = {tuple(sorted(pair)) for pair in zip(stages, [*stages[1:], stages[0]], strict=True) if mine in pair}
    for (first, second), shared in itertools.product(sorted(pairs), used):  # the same order on all processes
        work = dist.isend(number, second, shared) if mine == first else dist.irecv(number, first, shared)
        assert work is not None, "this process is in the group"
        work.wait()


def connect_groups_of_steps(model_chunks: list[torch.nn.Module], device: torch.device) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.post_wrap_hooks``: connect Megatron's groups that steps use. Collective, all processes.

    Megatron makes some twenty groups. A communicator takes device memory, so unused groups are left out.
    """
    config = get_model_config(model_chunks[0])
    groups = [
        hdp_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]
    if getattr(getattr(model_chunks[0], "ddp_config", None), "use_distributed_optimizer", False):
        groups.append(parallel_state.get_intra_distributed_optimizer_instance_group())
    if config.num_moe_experts is not None:
        groups += [
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
            parallel_state.get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True),
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_tensor_and_context_parallel_group(),
        ]
        if sums_over_all_tokens(config):
            groups.append(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    if config.pipeline_model_parallel_size > 1 and parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        groups.append(parallel_state.get_embedding_group())
    connect(groups, device)
    if config.pipeline_model_parallel_size > 1 and not config.batch_p2p_comm:
        connect_stages(device)
    return model_chunks


def sums_over_all_tokens(config: TransformerConfig) -> bool:
    """Return whether routers of experts sum over the tokens of all data-parallel ranks."""
    is_global = "global_aux_loss" in Balancing(config.moe_router_load_balancing_type).ways
    return bool(is_global or config.moe_z_loss_coeff or config.moe_router_enable_expert_bias)


def own_groups(
    name: str, mine: Sequence[tuple[int, ...]], device: torch.device, timeout_minutes: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the connected process groups of the rank tuples ``mine``. All processes create all, in the same order.

    A process waits only for the members of its own groups. With ``use_local_synchronization`` each process would create
    only its own groups. But torch then names a group after its ranks and the number of groups of the process, which
    differs between stages, so neighbours would wait under different names.
    """
    everyones: list[Sequence[tuple[int, ...]]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    in_order = sorted({ranks for wanted in everyones for ranks in wanted})
    settings: dict[str, Any] = {"timeout": timedelta(minutes=timeout_minutes), "group_desc": f"BYTESCALE_{name}"}
    groups = {ranks: dist.new_group(list(ranks), **settings) for ranks in in_order}
    connect((groups[ranks] for ranks in in_order if ranks in mine), device)
    return {ranks: groups[ranks] for ranks in mine}
