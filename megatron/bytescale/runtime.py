"""The state of one process while it trains: what the hooks and patches share. Nothing here is global."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bytescale_ext.activation.counts import Counts
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.attention.kernels import Kernel, KernelCalls
from bytescale_ext.config import HdpConfig
from bytescale_ext.data.loader import StepBatch
from bytescale_ext.metrics import RankStep, StepClock
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.cost import ModelShape, OffloadLimits, StageCost
from bytescale_ext.plan.document_slices import SliceRule
from bytescale_ext.plan.planner import HdpPlanner
from megatron.bytescale.core.datasets.remote import RemoteData
from megatron.bytescale.core.parallel_state import StageLinks


@dataclass
class HdpRuntime:
    """What one process knows while it trains with hybrid data parallelism.

    Attributes:
        config: what the user asked for.
        cost: what micro-batches cost on the largest pipeline stage, in FLOPs or, from a cost file, in seconds.
        clock: marks the phases of the running step.
        kernel: the attention kernel; set when the model is built.
        kernel_calls: how often it was called since the last step.
        comm: the ring communicator; set when the model is built.
        links: groups of neighbouring stages, with ``--seq1f1b-eager``; set when the model is built.
        slice_rule: how micro-batches are cut into slices (``--seq1f1b-splits``), or None.
        remote: what loads text, with ``--hdp-loader ray``.
        activations: what layers share under an activation policy, or None.
        offload: limits of the shares that plans move to host memory (``--activation-policy offload``), or None.
        step: the step that runs, or None between steps.
        totals: this rank's figures since the last log line, over ``num_steps`` steps of ``seconds``.
        step_started: when the running step began, or None when its time has been taken.
        plans_compared: the ranks have compared their plans once.
        warned_of_time: it was said that a planner ran out of its time.
    """

    config: HdpConfig
    cost: StageCost
    clock: StepClock
    kernel: Kernel | None = None
    kernel_calls: KernelCalls = field(default_factory=KernelCalls)
    comm: RingComm | None = None
    links: StageLinks | None = None
    slice_rule: SliceRule | None = None
    remote: RemoteData | None = None
    activations: ActivationStore | None = None
    offload: OffloadLimits | None = None
    step: StepBatch | None = None
    totals: RankStep = field(default_factory=RankStep)
    num_steps: int = 0
    seconds: float = 0.0
    step_started: float | None = None
    plans_compared: bool = False
    warned_of_time: bool = False

    @property
    def rank(self) -> int:
        """This process's HDP rank."""
        assert self.comm is not None, f"{self.comm=}"
        return self.comm.rank

    @property
    def device(self) -> torch.device:
        """Where micro-batches are computed."""
        return torch.device("cuda", torch.cuda.current_device()) if self.clock.on_cuda else torch.device("cpu")

    def planner(self) -> HdpPlanner:
        """The function from the lengths of a step to its plan; pure, equal on every rank."""
        config = self.config
        return HdpPlanner(
            num_ranks=config.num_ranks,
            tokens_per_rank=config.tokens_per_rank,
            cost=self.cost,
            tokens_multiple=config.rows_multiple,
            balance=config.balance,
            num_stages=config.num_stages,
            num_slices=config.num_slices,
            kept_tokens=0 if self.slice_rule is None else self.slice_rule.kept_tokens,
            eager=config.eager,
            aligned=config.aligned,
            ranks_per_node=config.ranks_per_node,
            static_width=config.static_width,
            offload=self.offload,
        )

    @property
    def offload_layers(self) -> int | None:
        """Layers of a rank where plans may offload, which their check needs; else None."""
        return None if self.offload is None else self.offload.num_layers

    def reset_counts(self) -> None:
        """Count what is sent and computed anew: an evaluation may have run since the last step."""
        if self.comm is not None:
            self.comm.stats.reset()
        self.kernel_calls.num_forward = self.kernel_calls.num_backward = 0

    def count_step(self) -> None:
        """Add the finished step's figures to the totals."""
        step, comm = self.step, self.comm
        assert step is not None and comm is not None, f"{step=} {comm=}"
        mine = step.plan.ranks[self.rank]
        store = self.activations
        counts = Counts() if store is None else store.take_counts()
        self.totals += RankStep(
            work_seconds=self.clock.work_seconds(),
            planned_work=sum(self.cost.both.micro_batch_cost(micro_batch, step.lengths) for micro_batch in mine),
            num_micro_batches=sum(bool(micro_batch.shards) for micro_batch in mine),
            num_tokens=sum(micro_batch.num_tokens for micro_batch in mine),
            num_rows=sum(packed.num_rows for packed in step.micro_batches),
            plan_wait_seconds=step.wait_seconds,
            bytes_sent=comm.stats.bytes_sent,
            attention_calls=self.kernel_calls.num_forward + self.kernel_calls.num_backward,
            kept_bytes=counts.kept_bytes,
            swapped_bytes=counts.swapped_bytes,
            recomputed_bytes=counts.recomputed_bytes,
            host_peak_bytes=0.0 if store is None else store.link.arena.peak_bytes,
        )
        self.num_steps += 1

    def documents(self, limit: int = 4) -> str:
        """The documents of the running step on this rank, for an error message."""
        assert self.step is not None, f"{self.step=}"
        names = sorted({name for packed in self.step.micro_batches for name in packed.documents})
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return ", ".join(names[:limit]) + more if names else "padding only"


def model_shape(args: Any) -> ModelShape:
    """The sizes that a model's FLOPs depend on, from Megatron's arguments."""
    experts = {}
    if args.num_experts:
        every = args.moe_layer_freq  # a number, or 0 or 1 for each layer
        experts = {
            "num_expert_layers": sum(every) if isinstance(every, list) else -(-args.num_layers // every),
            "expert_ffn_hidden": args.moe_router_topk * args.moe_ffn_hidden_size
            + (args.moe_shared_expert_intermediate_size or 0),
            "num_experts": args.num_experts,
        }
    return ModelShape(
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels,
        ffn_hidden=args.ffn_hidden_size,
        gated=bool(args.swiglu),
        vocab=args.padded_vocab_size,
        **experts,
    )
