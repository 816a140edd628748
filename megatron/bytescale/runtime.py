"""What changes in one process while it trains: shared by hooks and patches. Nothing here is global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bytescale_ext.activation.counts import Counts
from bytescale_ext.activation.link import Link
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.attention.kernels.table import Kernel, KernelCalls
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.planner import slicing, step_cost
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.loading.loads import LoadHistory
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.measure.metrics import RankStep, StepClock
from bytescale_ext.measure.peak import PeakMeter
from bytescale_ext.measure.stragglers import PaceWindow, counts_for_pace
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.step.sizes import Slicing
from bytescale_ext.plan.step.table import shards_of_rank
from megatron.bytescale.core.optimizer.late import LateUpdates
from megatron.bytescale.core.parallel_state import StageLinks, VirtualLinks
from megatron.bytescale.core.tensor_parallel.weight_gradients import WeightGradients
from megatron.bytescale.core.transformer.moe.counted_layer import TokenCounts
from megatron.bytescale.core.transformer.moe.loads import ExpertLoads


@dataclass
class Totals:
    """This rank's figures since the last log line.

    Attributes:
        figures: sums over steps.
        num_steps: how many.
        seconds: of these steps together.
        model_flops: of these steps on all ranks.
        active_experts: sum over these steps.
        stale_steps, most_stale_steps: sum over these steps, and the most of one.
        step_samples: samples of the last step.
        step_started: when the running step began, or None once its time is counted.
    """

    figures: RankStep = field(default_factory=RankStep)
    num_steps: int = 0
    seconds: float = 0.0
    model_flops: float = 0.0
    active_experts: float = 0.0
    stale_steps: int = 0
    most_stale_steps: int = 0
    step_samples: int = 0
    step_started: float | None = None


@dataclass
class Runtime:
    """One process of a run.

    Attributes:
        run: everything that is decided; replaced only once, when speeds are measured at start.
        clock: marks the phases of the running step.
        kernel: the attention kernel; set when the model is built.
        kernel_calls: calls of the kernel since the last step.
        comm: the ring communicator; set when the model is built; None where samples have no rings.
        links: groups of neighbouring stages, where they receive ahead or have overlapped virtual stages; set when the
            model is built.
        read_batch: data iterator -> tensors [b, s] of one micro-batch by name, for samples in slices.
        activations: the shared state of layers under an activation policy, or None.
        key_link: to host memory, for swapped keys of slices where there is no activation policy; else None.
        weight_gradients: in a step that runs by our schedule, those that wait for idle time (zero bubble); else None.
        expert_loads: in a step of slices, what their routers note for each other; else None.
        expert_counts: tokens of experts in the running step, where these are recorded or followed; else None.
        load_history: loads of experts with which steps are planned; None: they are not measured.
        active_experts: mean experts of a token in the step that ends, of routers whose number varies; else None.
        late_updates: of the optimizer, where they run beside training; set when it is built; else None.
        stale_steps: steps whose gradients the parameters of the running step lack.
        step: the step that runs, or None between steps.
        next_step: waits for the step after it, and returns None at the end of the data.
        totals: figures since the last log line.
        pace: how fast this rank has computed lately.
        peak: measures the memory of ``--hdp-memory-step``.
        hosts: of all processes; known from the first log line on.
        tokens_so_far: of the whole run, on the rank that writes the log.
        plans_compared: the ranks have compared their plans once.
        warned_of_time: the user was told that a planner ran out of time.
    """

    run: RunConfig
    clock: StepClock
    kernel: Kernel | None = None
    kernel_calls: KernelCalls = field(default_factory=KernelCalls)
    comm: RingComm | None = None
    links: StageLinks | VirtualLinks | None = None
    read_batch: Callable[[Any], dict[str, torch.Tensor | None]] | None = None
    activations: ActivationStore | None = None
    key_link: Link | None = None
    weight_gradients: WeightGradients | None = None
    expert_loads: ExpertLoads | None = None
    expert_counts: TokenCounts | None = None
    load_history: LoadHistory | None = None
    active_experts: float | None = None
    late_updates: LateUpdates | None = None
    stale_steps: int = 0
    step: StepBatch | None = None
    next_step: Callable[[], StepBatch | None] | None = None
    totals: Totals = field(default_factory=Totals)
    pace: PaceWindow = field(default_factory=PaceWindow)
    peak: PeakMeter = field(default_factory=PeakMeter)
    hosts: tuple[str, ...] = ()
    tokens_so_far: int = 0
    plans_compared: bool = False
    warned_of_time: bool = False

    @classmethod
    def of(cls, run: RunConfig) -> Runtime:
        """Return the state of a process before it trains."""
        return cls(run, StepClock(run.process.on_cuda))

    @property
    def hdp(self) -> HdpConfig:
        """Settings of hybrid data parallelism, which must be on."""
        return self.run.get(HdpConfig)

    @property
    def slicing(self) -> Slicing:
        """How the micro-batches of the running step are sliced."""
        chosen = None if self.step is None else self.step.plan.slicing
        return slicing(self.run) if chosen is None else chosen

    @property
    def link(self) -> Link | None:
        """The link to host memory; None where nothing is swapped."""
        return self.key_link if self.activations is None else self.activations.link

    @property
    def rank(self) -> int:
        """This process's HDP rank."""
        assert self.comm is not None, f"{self.comm=}"
        return self.comm.rank

    @property
    def device(self) -> torch.device:
        """Where micro-batches are computed."""
        return torch.device("cuda", torch.cuda.current_device()) if self.clock.on_cuda else torch.device("cpu")

    def reset_counts(self) -> None:
        """Count messages and kernel calls from zero: an evaluation may have run since the last step."""
        if self.comm is not None:
            self.comm.stats.reset()
        self.kernel_calls.num_forward = self.kernel_calls.num_backward = 0

    def count_step(self) -> None:
        """Add the finished step's figures to the totals."""
        step, comm = self.step, self.comm
        assert step is not None and comm is not None, f"{step=} {comm=}"
        mine = shards_of_rank(step.plan.ranks, self.rank)
        store, cost, link = self.activations, step_cost(self.run), self.link
        counts = Counts() if store is None else store.take_counts()
        self.totals.figures += RankStep(
            work_seconds=self.clock.work_seconds(),
            planned_work=cost.both.rank_cost(mine, step.lengths),
            num_micro_batches=mine.num_filled,
            num_tokens=int(mine.tokens.sum()),
            num_rows=sum(step.row_counts),
            plan_wait_seconds=step.wait_seconds,
            bytes_sent=comm.stats.bytes_sent,
            attention_calls=self.kernel_calls.num_forward + self.kernel_calls.num_backward,
            kept_bytes=counts.kept_bytes,
            swapped_bytes=counts.swapped_bytes,
            recomputed_bytes=counts.recomputed_bytes,
            host_peak_bytes=0.0 if link is None else link.arena.peak_bytes,
            num_slices=self.slicing.num_slices,
            device_peak_bytes=self.peak.end(),
        )
        seconds = self.clock.backward_seconds()
        for index, micro_batch in enumerate(step.plan.ranks[self.rank]):
            if index in seconds and counts_for_pace(micro_batch, step.plan.tokens_per_rank):
                self.pace.add(cost.backward.micro_batch_cost(micro_batch, step.lengths), seconds[index])
        self.totals.num_steps += 1
        self.totals.stale_steps += self.stale_steps
        self.totals.most_stale_steps = max(self.totals.most_stale_steps, self.stale_steps)
        self.totals.step_samples = len(step.sample_ids)
        shape = self.run.shape
        if self.active_experts is not None:
            shape = shape.with_experts_per_token(self.active_experts)
            self.totals.active_experts += self.active_experts
        self.totals.model_flops += model_flops(shape, step.lengths)
