"""Loads of experts by document, for the balancing loss of single documents (``seq_aux_loss``).

For a document d of T_d tokens, E experts and k experts per token (DeepSeek-V3, section 2.1.2, equations 17 to 20)::

    L_d = E / (k T_d^2) sum_i n_di sum_x p_i(x)     n_di: tokens of d that choose expert i, a constant; p_i(x): scores
    L   = 1/T sum_d T_d L_d                         T: tokens of the step

The gradient of p_i(x) is E n_di / (k T_d T), the same for all tokens of a document. So ranks and slices with parts of a
document need only its counts n_di. Each router sums them once per micro-batch, in the forward pass of its last slice:
over slices, over tensor-parallel ranks, and over the ring of each document. All backward passes of the micro-batch come
later. A recomputed layer uses the counts of its first forward pass and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.parallel.upload import upload
from megatron.bytescale.arguments.layer_settings import Balancing

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from bytescale_ext.data.samples.packed import PackedMicroBatch
    from bytescale_ext.parallel.p2p import Comm, Transfer
    from bytescale_ext.plan.step.micro_batch import Shard
    from megatron.bytescale.runtime import Runtime


@dataclass(eq=False)
class RouterLoads:
    """The loads of one router in one micro-batch.

    Attributes:
        tokens: tokens of each document that choose each expert, int32 [documents, experts].
        scores: sum of this rank's scores, float32 [documents, experts]; None once the loss is recorded.
        slices: slices whose loads are included.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None
    slices: set[int] = field(default_factory=set)


@dataclass(eq=False)
class DocumentLoads:
    """The loads of one micro-batch in all routers of a model chunk.

    Attributes:
        lengths: tokens of each document on all ranks, float32 [documents].
        rings: each ring of several ranks, and the indices of its documents, int64 [documents of the ring]. Rings are in
            the order of their first documents, which is the same on all members.
        num_slices: slices of the micro-batch.
        routers: (router, depth) -> its loads.
    """

    lengths: torch.Tensor
    rings: tuple[tuple[tuple[int, ...], torch.Tensor], ...]
    num_slices: int
    routers: dict[tuple[object, int], RouterLoads] = field(default_factory=dict)

    @classmethod
    def of(
        cls, shards: Sequence[Shard], lengths: Sequence[int], num_slices: int, device: torch.device
    ) -> DocumentLoads:
        """Return the empty loads of a micro-batch; ``lengths``: tokens of each sequence of the step.

        A micro-batch of padding has one document without tokens.
        """
        in_rings: dict[tuple[int, ...], list[int]] = {}
        for index, shard in enumerate(shards):
            if len(shard.ring) > 1:
                in_rings.setdefault(shard.ring, []).append(index)
        tokens = torch.tensor([lengths[shard.seq] for shard in shards] or [1], dtype=torch.float32)
        rings = tuple((ring, upload(torch.tensor(indices), device)) for ring, indices in in_rings.items())
        return cls(upload(tokens, device), rings, num_slices)

    def add(
        self, router: tuple[object, int], part: RoutedRows, scores: torch.Tensor, chosen: torch.Tensor
    ) -> RouterLoads | None:
        """Add one slice's loads of a router at a depth. ``scores``, ``chosen``: [rows, experts], 0 in padding.

        Returns:
            The loads if the slice is the last slice of the micro-batch and runs for the first time, else None.
        """
        shape = (len(self.lengths), scores.shape[-1])
        loads = self.routers.get(router)
        if loads is None:
            loads = self.routers[router] = RouterLoads(
                torch.zeros(shape, dtype=torch.int32, device=scores.device),
                torch.zeros(shape, dtype=torch.float32, device=scores.device),
            )
        if part.slice_index in loads.slices:
            return None
        assert loads.scores is not None, "slices run in order"
        loads.slices.add(part.slice_index)
        loads.tokens.index_add_(0, part.documents, chosen.to(torch.int32))
        loads.scores.index_add_(0, part.documents, scores.detach().float())
        return loads if part.slice_index == self.num_slices - 1 else None

    def share(self, loads: RouterLoads, group: dist.ProcessGroup, comm: Comm, rank: int) -> None:
        """Sum the counts of a finished micro-batch over the tensor-parallel ``group`` and over rings.

        All members of a ring call it for their common micro-batches in the same order.
        """
        if group.size() > 1:
            dist.all_reduce(loads.tokens, group=group)
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for ring, indices in self.rings:
            own = loads.tokens[indices]
            others = [other for other in ring if other != rank]
            received = own.new_empty((len(others), *own.shape))
            sends += [(own, other) for other in others]
            receives += zip(received, others, strict=True)
            arriving.append((indices, received))
        if not arriving:
            return
        comm.exchange(sends, receives).wait()
        for indices, received in arriving:
            loads.tokens.index_add_(0, indices, received.sum(0, dtype=torch.int32))

    def take_loss(self, loads: RouterLoads, topk: int) -> torch.Tensor:
        """Return this rank's part of T L, a scalar, and free the sums of scores."""
        scores, loads.scores = loads.scores, None
        assert scores is not None, "the loss is taken once"
        return (self.weights(loads, topk) * scores).sum()

    def weights(self, loads: RouterLoads, topk: int) -> torch.Tensor:
        """Return E n_di / (k T_d), the gradient of T L with respect to scores: float32 [documents, experts]."""
        return loads.tokens * (loads.tokens.shape[-1] / topk / self.lengths)[:, None]


class RoutedRows(NamedTuple):
    """The rows of the running pass.

    Attributes:
        loads: loads of its micro-batch.
        slice_index: slice of the micro-batch.
        documents: index of each row's document in the micro-batch, int64 [rows]; 0 in padding.
    """

    loads: DocumentLoads
    slice_index: int
    documents: torch.Tensor


def balances_documents(config: TransformerConfig) -> bool:
    """Return whether a model has experts with the balancing loss of single documents."""
    if not config.num_moe_experts or not config.moe_aux_loss_coeff:
        return False
    return "seq_aux_loss" in Balancing(config.moe_router_load_balancing_type).ways


def route_by_document(
    runtime: Runtime, packed: PackedMicroBatch, index: int, chunk: torch.nn.Module
) -> Callable[[torch.Tensor], None]:
    """Announce the documents of a pass of [rows] to its routers; return a hook of its output that does so again.

    The hook runs before the backward pass of the output, [1, rows, ...].

    Args:
        runtime: state of the process.
        packed: micro-batch or slice, on the host.
        index: index of the micro-batch.
        chunk: unwrapped model chunk.
    """
    step, num_slices = runtime.step.batch, runtime.slicing.num_slices
    assert step is not None, "no planned step is running"
    planned = step.plan.ranks[runtime.rank]
    shards = planned[index].shards if index < len(planned) else ()
    slice_index = packed.layout.index if isinstance(packed.layout, SliceLayout) else 0
    key = (index, getattr(chunk, "vp_stage", None) or 0)
    unfinished = runtime.step.document_loads
    if not slice_index:
        unfinished[key] = DocumentLoads.of(shards, step.lengths, num_slices, runtime.device)
    loads = unfinished.pop(key) if slice_index == num_slices - 1 else unfinished[key]
    documents = documents_of_rows(packed, shards)
    if get_model_config(chunk).sequence_parallel:
        documents = documents.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]
    routed = runtime.step.routed = RoutedRows(loads, slice_index, upload(documents.contiguous(), runtime.device))

    def before_backward(_: torch.Tensor) -> None:
        runtime.step.routed = routed

    return before_backward


def documents_of_rows(packed: PackedMicroBatch, shards: Sequence[Shard]) -> torch.Tensor:
    """Return the index in ``shards`` of the document of each row, int64 [rows]; 0 in padding."""
    indices = {shard.seq: index for index, shard in enumerate(shards)}
    parts = packed.micro_batch.shards
    counts = torch.tensor([part.num_tokens for part in parts], dtype=torch.int64)
    own = torch.tensor([indices[part.seq] for part in parts], dtype=torch.int64).repeat_interleave(counts)
    documents = torch.zeros(packed.num_rows, dtype=torch.int64)
    documents[: len(own)] = own
    return documents
