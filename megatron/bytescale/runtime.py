"""The state of one process while it trains: what the hooks and patches share. Nothing here is global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bytescale_ext.attention.kernels import Kernel, KernelCalls
from bytescale_ext.config import HdpConfig
from bytescale_ext.data.loader import StepBatch
from bytescale_ext.metrics import RankStep, StepClock
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.cost import CostModel, ModelShape
from bytescale_ext.plan.hdp import plan_naive, plan_static_cp
from bytescale_ext.plan.shapes import StepPlan


@dataclass
class HdpRuntime:
    """What one process knows while it trains with hybrid data parallelism.

    Attributes:
        config: what the user asked for.
        cost: FLOPs of a micro-batch, for the planned imbalance.
        clock: marks the phases of the running step.
        kernel: the attention kernel; set when the model is built.
        kernel_calls: how often it was called since the last step.
        comm: the ring communicator; set when the model is built.
        step: the step that runs, or None between steps.
        totals: this rank's figures since the last log line, over ``num_steps`` steps of ``seconds``.
        step_started: when the running step began, or None when its time has been taken.
    """

    config: HdpConfig
    cost: CostModel
    clock: StepClock
    kernel: Kernel | None = None
    kernel_calls: KernelCalls = field(default_factory=KernelCalls)
    comm: RingComm | None = None
    step: StepBatch | None = None
    totals: RankStep = field(default_factory=RankStep)
    num_steps: int = 0
    seconds: float = 0.0
    step_started: float | None = None

    @property
    def rank(self) -> int:
        """This process's HDP rank."""
        assert self.comm is not None, f"{self.comm=}"
        return self.comm.rank

    @property
    def device(self) -> torch.device:
        """Where micro-batches are computed."""
        return torch.device("cuda", torch.cuda.current_device()) if self.clock.on_cuda else torch.device("cpu")

    def planner(self) -> Callable[[Sequence[int]], StepPlan]:
        """The function from the lengths of a step to its plan; pure, equal on every rank."""
        config = self.config
        width = config.static_width
        return partial(
            plan_naive if width is None else partial(plan_static_cp, width=width),
            num_ranks=config.num_ranks,
            tokens_per_rank=config.tokens_per_rank,
            tokens_multiple=config.rows_multiple,
        )

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
        self.totals += RankStep(
            work_seconds=self.clock.work_seconds(),
            planned_work=sum(self.cost.micro_batch_cost(micro_batch, step.lengths) for micro_batch in mine),
            num_micro_batches=len(mine),
            num_tokens=sum(micro_batch.num_tokens for micro_batch in mine),
            num_rows=sum(packed.num_rows for packed in step.micro_batches),
            plan_wait_seconds=step.wait_seconds,
            bytes_sent=comm.stats.bytes_sent,
            attention_calls=self.kernel_calls.num_forward + self.kernel_calls.num_backward,
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
    return ModelShape(
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels,
        ffn_hidden=args.ffn_hidden_size,
        gated=bool(args.swiglu),
        vocab=args.padded_vocab_size,
    )
