"""DeepEP's exchange of tokens in plain PyTorch, with its public signatures and the checks of its kernels.

``Buffer`` sends a token once to each rank that has one of its experts. ``HybridEPBuffer`` sends it once to each of its
experts and sorts the received tokens by expert. Both ends of an exchange call ``torch.distributed``, so a rank that
calls them less often than its peers hangs, as on GPUs. On a CPU every operation has ended when its call returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class EventHandle:
    """An event on the current stream."""

    def current_stream_wait(self) -> None:
        """Return at once."""


class EventOverlap:
    """An event that another stream can wait for."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[object, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Wait for the event. Raises AssertionError without one, as for a call without ``async_finish``."""
        assert self.event is not None, "no event to wait for"
        self.event.current_stream_wait()


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send rows [n, ...] to all ranks, ``sent`` of them to each in turn; return the received rows. Collective."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def counts_of_ranks(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the counts [k] of each rank, [ranks, k]. Collective."""
    found = [torch.empty_like(counts) for _ in range(group.size())]
    dist.all_gather(found, counts.contiguous(), group=group)
    return torch.stack(found)


@dataclass(frozen=True)
class Config:
    """Sizes of the buffers of an exchange."""

    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class Handle:
    """Routes of a dispatch.

    Attributes:
        rows: row of the token, by sent copy, [copies].
        sent, received: number of copies for and from each rank.
        num_tokens: number of tokens on this rank.
        top_k: number of choices of a token.
    """

    rows: torch.Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int
    top_k: int


class Buffer:
    """Exchange of tokens between the ranks of a group."""

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert not low_latency_mode, "not played"
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "the number of SMs must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Return the tokens for each rank [ranks], None, for each expert [experts], and which rank gets which token."""
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        assert num_experts % self.group.size() == 0
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool, device=topk_idx.device)
        chosen.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
        in_rank = chosen[:, :num_experts].view(len(topk_idx), self.group.size(), -1).any(-1)
        per_expert = chosen[:, :num_experts].sum(0, dtype=torch.int32)
        event = EventOverlap(EventHandle() if async_finish else None)
        return in_rank.sum(0, dtype=torch.int32), None, per_expert, in_rank, event

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Send tokens x [tokens, hidden]; return (tokens, local experts or -1, weights, counts, handle, event)."""
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.shape[1] * x.element_size() % 16 == 0, "rows are copied in parts of 16 bytes"
        event = EventOverlap(EventHandle() if async_finish else None)
        if handle is not None:
            assert topk_idx is None
            assert len(x) == handle.num_tokens
            return exchange(x[handle.rows], handle.sent, handle.received, self.group), None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        rank, num_local = self.group.rank(), len(num_tokens_per_expert) // self.group.size()
        counts = counts_of_ranks(torch.cat([num_tokens_per_rank, num_tokens_per_expert]), self.group)
        ranks, rows = is_token_in_rank.T.nonzero(as_tuple=True)
        handle = Handle(rows, num_tokens_per_rank.tolist(), counts[:, rank].tolist(), len(x), topk_idx.shape[1])
        first = ranks[:, None] * num_local
        local = topk_idx[rows] - first
        is_there = (topk_idx[rows] >= first) & (local < num_local)
        tokens, indices, weights = (
            exchange(values, handle.sent, handle.received, self.group)
            for values in (x[rows], local.where(is_there, -1), topk_weights[rows].where(is_there, 0.0))
        )
        of_experts = counts[:, self.group.size() :].sum(0)[rank * num_local :][:num_local]
        return tokens, indices, weights, of_experts.tolist(), handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send x [received tokens, hidden] back; return the sums over ranks of tokens and of weights, and an event."""
        assert x.dim() == 2
        assert x.is_contiguous()
        assert len(x) == sum(handle.received)
        returned = exchange(x, handle.received, handle.sent, self.group)
        combined = x.new_zeros(handle.num_tokens, x.shape[1]).index_add_(0, handle.rows, returned)
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            parts = exchange(topk_weights, handle.received, handle.sent, self.group)
            weights = parts.new_zeros(handle.num_tokens, handle.top_k).index_add_(0, handle.rows, parts)
        return combined, weights, EventOverlap(EventHandle() if async_finish else None)


@dataclass(frozen=True)
class HybridHandle:
    """Routes of a dispatch to experts.

    Attributes:
        experts, rows: expert and row of the token, by sent copy, [copies].
        sent, received: number of copies for and from each rank.
        order: place of each received copy among the rows sorted by expert, [copies].
        num_rows: number of these rows, padding included.
        shape: number of tokens on this rank and of experts.
    """

    experts: torch.Tensor
    rows: torch.Tensor
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    num_rows: int
    shape: tuple[int, int]


class HybridEPBuffer:
    """Exchange of tokens that returns them sorted by expert. All ranks of a group must have equally many tokens."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        assert not use_fp8
        self.group, self.hidden_dim, self.num_local = group, hidden_dim, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: HybridHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor | None, HybridHandle]:
        """Send hidden [tokens, hidden]; return (rows, their probabilities, None, rows of each expert, handle)."""
        assert hidden.dim() == 2
        assert hidden.shape[1] == self.hidden_dim
        per_expert = None
        if handle is None:
            assert routing_map is not None
            handle, per_expert = self._routes(routing_map, pad_multiple or 1)
        rows = self._sort(hidden[handle.rows], handle)
        sorted_probs = None
        if probs is not None:
            assert probs.dtype == torch.float32
            sorted_probs = self._sort(probs[handle.rows, handle.experts], handle)
        return rows, sorted_probs, None, per_expert, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sums of rows [rows, hidden] per token, [tokens, hidden], and probabilities [tokens, experts]."""
        assert handle is not None
        assert len(hidden) == handle.num_rows
        returned = exchange(hidden[handle.order], handle.received, handle.sent, self.group)
        combined = hidden.new_zeros(handle.shape[0], hidden.shape[1]).index_add_(0, handle.rows, returned)
        if probs is None:
            return combined, None
        values = exchange(probs[handle.order], handle.received, handle.sent, self.group)
        combined_probs = values.new_zeros(handle.shape)
        combined_probs[handle.rows, handle.experts] = values
        return combined, combined_probs

    def _routes(self, routing_map: torch.Tensor, multiple: int) -> tuple[HybridHandle, torch.Tensor]:
        """Return the routes of choices, bool [tokens, experts], and the rows of each local expert. Collective."""
        num_tokens, num_experts = routing_map.shape
        sizes = counts_of_ranks(torch.tensor([num_tokens], device=routing_map.device), self.group)
        assert (sizes == num_tokens).all(), f"ranks have {sizes.flatten().tolist()} tokens"
        assert num_tokens % 64 == 0, "kernels take 64 tokens at a time"
        counts = counts_of_ranks(routing_map.sum(0), self.group)
        experts, rows = routing_map.T.nonzero(as_tuple=True)
        mine = counts[:, self.group.rank() * self.num_local :][:, : self.num_local]  # [ranks, local experts]
        per_expert = mine.sum(0)
        per_expert += -per_expert % multiple
        starts = (per_expert.cumsum(0) - per_expert) + (mine.cumsum(0) - mine)
        order = torch.cat([
            torch.arange(int(start), int(start + count), device=routing_map.device)
            for start, count in zip(starts.flatten(), mine.flatten(), strict=True)
        ])  # fmt: skip
        sent = counts[self.group.rank()].view(self.group.size(), -1).sum(1).tolist()
        handle = HybridHandle(
            experts, rows, sent, mine.sum(1).tolist(), order, int(per_expert.sum()), (num_tokens, num_experts)
        )
        return handle, per_expert

    def _sort(self, copies: torch.Tensor, handle: HybridHandle) -> torch.Tensor:
        """Send copies [copies, ...] and return them sorted by expert, with zeros as padding, [rows, ...]."""
        arrived = exchange(copies, handle.sent, handle.received, self.group)
        rows = arrived.new_zeros(handle.num_rows, *arrived.shape[1:])
        rows[handle.order] = arrived
        return rows
