"""The state of one training process, shared by hooks and patches. None of it is global.

``Parts`` are created while the model is built and then stay. ``StepState`` belongs to one step, ``LogState`` to the
log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bytescale_ext.activation.counts import Counts
from bytescale_ext.activation.link import Link
from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.attention.kernels.table import Kernel, KernelCalls
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import Process, RunConfig
from bytescale_ext.data.loading.loads import LoadHistory
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.measure.learning import CostLearner
from bytescale_ext.measure.metrics import RankStep, StepClock
from bytescale_ext.measure.peak import PeakMeter
from bytescale_ext.measure.stragglers import PaceMeter, counts_for_pace
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.learned import LearnedCosts
from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.planner import balanced_cost
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from bytescale_ext.plan.step.table import shards_of_rank
from bytescale_ext.states.node_memory import HostBlocks
from megatron.bytescale.core.distributed.ordered_reductions import ReductionGate
from megatron.bytescale.core.optimizer.late import LateUpdates
from megatron.bytescale.core.optimizer.qk_clip import MainWeights
from megatron.bytescale.core.parallel_state import StageLinks, VirtualLinks
from megatron.bytescale.core.pipeline_parallel.pairs import PairLoss
from megatron.bytescale.core.tensor_parallel.weight_gradients import WeightGradients
from megatron.bytescale.core.transformer.moe.counted_layer import TokenCounts
from megatron.bytescale.core.transformer.moe.document_loads import DocumentLoads, RoutedRows
from megatron.bytescale.core.transformer.moe.loads import ExpertLoads


@dataclass
class Totals:
    """Figures of this rank since the last log line.

    Attributes:
        figures: sums over steps.
        num_steps: number of steps.
        seconds: wall time of these steps, in seconds.
        model_flops: floating-point operations of these steps on all ranks.
        active_experts: sum over these steps of a token's mean number of experts.
        stale_steps: sum over these steps of the number of steps whose gradients the parameters lacked.
        most_stale_steps: largest number of such steps in one step.
        losses: sum of each loss over these steps, each [].
        num_updates: number of these steps that updated parameters.
        predicted_passes: predicted seconds of the passes of these steps; 0 on ranks that predict nothing.
        predicted_update: predicted seconds of the updates of these steps.
        step_samples: samples of the last step.
        step_started: start of the current step, in seconds of ``time.perf_counter``; None once the step is counted.
    """

    figures: RankStep = field(default_factory=RankStep)
    num_steps: int = 0
    seconds: float = 0.0
    model_flops: float = 0.0
    active_experts: float = 0.0
    stale_steps: int = 0
    most_stale_steps: int = 0
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    num_updates: int = 0
    predicted_passes: float = 0.0
    predicted_update: float = 0.0
    step_samples: int = 0
    step_started: float | None = None


@dataclass(frozen=True)
class Parts:
    """The objects with which a process computes and communicates. Features add theirs while the model is built.

    Attributes:
        clock: clock that marks the phases of the current step.
        peak: meter of the memory of ``--hdp-memory-step``.
        kernel: attention kernel.
        kernel_calls: calls of the kernel since the last step.
        comm: ring communicator; None if samples have no rings.
        links: groups of neighbouring stages; None unless stages receive ahead or overlap virtual stages.
        read_batch: data iterator -> tensors [b, s] of one micro-batch by name, for samples in slices.
        activations: state that layers share under an activation policy, or None.
        key_link: link to host memory for swapped keys of slices without an activation policy, or None.
        layer_specs: functions that also change the layer specs of multi-token prediction, in order.
        expert_counts: counter of the tokens of each expert in the current step; None if no feature reads them.
        load_history: expert loads of finished steps, as input of plans; None if loads are not measured.
        learner: learner of costs and speeds of ranks, or None.
        late_updates: optimizer updates that run during later steps, or None.
        pair_loss: loss of pairs of answers, or None.
        reductions: gate of the gradient reductions that overlap with backward passes, or None.
        host_blocks: host memory of gradients and parameters in stages 2 and 3 of the paged states, or None.
        main_weights: float32 copies of weights that the optimizer updates; empty if no feature reads them.
    """

    clock: StepClock
    peak: PeakMeter = field(default_factory=PeakMeter)
    kernel: Kernel | None = None
    kernel_calls: KernelCalls = field(default_factory=KernelCalls)
    comm: RingComm | None = None
    links: StageLinks | VirtualLinks | None = None
    read_batch: Callable[[Any], dict[str, torch.Tensor | None]] | None = None
    activations: ActivationStore | None = None
    key_link: Link | None = None
    layer_specs: tuple[Callable[[Any], Any], ...] = ()
    expert_counts: TokenCounts | None = None
    load_history: LoadHistory | None = None
    learner: CostLearner | None = None
    late_updates: LateUpdates | None = None
    reductions: ReductionGate | None = None
    pair_loss: PairLoss | None = None
    host_blocks: HostBlocks | None = None
    main_weights: MainWeights = field(default_factory=dict)

    @property
    def link(self) -> Link | None:
        """The link to host memory; None without swapping."""
        return self.key_link if self.activations is None else self.activations.link


@dataclass(frozen=True)
class LabelShares:
    """Labels of a step on all ranks, in proportion; scalars, on the device in a step with auxiliary losses.

    Attributes:
        per_token: labels divided by tokens.
        per_guess: labels divided by the tokens that the first draft head guesses.
    """

    per_token: torch.Tensor | float = 1.0
    per_guess: torch.Tensor | float = 1.0


@dataclass
class StepState:
    """State of one step.

    Attributes:
        batch: plan and micro-batches of the current step; None between steps.
        next_batch: function that waits for the batch of the next step; it returns None at the end of the data.
        weight_gradients: weight gradients that wait for idle time (zero bubble), in a step of our schedule; else None.
        expert_loads: routing loads that slices of one micro-batch share; None outside a step of slices.
        routed: documents of the running pass's rows; None in models without ``seq_aux_loss``.
        depth: depth of the multi-token prediction layer that runs or runs backward; 0 in the other layers.
        document_loads: (micro-batch, model chunk) -> loads of its documents, until its last slice runs forward.
        label_shares: labels of the step in proportion to its tokens, and to the first guesses of draft heads.
        token_numbers: number of each row of the running pass, int64 [rows]; None in models without dropout or jitter.
        active_experts: mean number of experts per token if routers vary it; else None.
        stale_steps: number of steps whose gradients the parameters lack.
        counted_lengths: lengths of the sequences that this rank has to count for Megatron's FLOPs.
    """

    batch: StepBatch | None = None
    next_batch: Callable[[], StepBatch | None] | None = None
    weight_gradients: WeightGradients | None = None
    expert_loads: ExpertLoads | None = None
    routed: RoutedRows | None = None
    depth: int = 0
    document_loads: dict[tuple[int, int], DocumentLoads] = field(default_factory=dict)
    label_shares: LabelShares = LabelShares()
    token_numbers: torch.Tensor | None = None
    active_experts: float | None = None
    stale_steps: int = 0
    counted_lengths: list[int] = field(default_factory=list)


@dataclass
class LogState:
    """Counts and messages of the log so far.

    Attributes:
        totals: figures since the last log line.
        pace: recent speed of this rank.
        hosts: host names of all processes; empty until the first log line.
        tokens_so_far: tokens that the run has trained on, before a resume too.
        costs: learned costs that the log named last.
        written_costs: learned costs that were written last; None: none yet.
        plans_compared: whether the ranks have compared a plan yet.
        warned_of_time: whether the log has warned that a planner ran out of time.
        rests: seconds of a step outside of passes in the last log intervals.
    """

    totals: Totals = field(default_factory=Totals)
    pace: PaceMeter = field(default_factory=PaceMeter)
    hosts: tuple[str, ...] = ()
    tokens_so_far: int = 0
    costs: LearnedCosts = field(default_factory=LearnedCosts)
    written_costs: LearnedCosts | None = None
    plans_compared: bool = False
    warned_of_time: bool = False
    rests: deque[float] = field(default_factory=lambda: deque(maxlen=8))


@dataclass
class Runtime:
    """One process of a run.

    Attributes:
        run: all decisions about the run; replaced once if speeds are measured at start.
        parts: objects with which the process computes and communicates.
        step: state of the current step.
        log: state of the log.
    """

    run: RunConfig
    parts: Parts
    step: StepState = field(default_factory=StepState)
    log: LogState = field(default_factory=LogState)

    @classmethod
    def of(cls, run: RunConfig) -> Runtime:
        """Return the state of a process before its model is built."""
        return cls(run, Parts(StepClock(run.process.on_cuda)))

    @classmethod
    def alone(cls, shape: ModelShape, dtype: torch.dtype, device: torch.device, kernel: Kernel) -> Runtime:
        """Return the state of a process that decodes or measures a whole model without features."""
        process = Process(rank=0, on_cuda=device.type == "cuda", dtype=dtype)
        setup = setup_of_cost(cost_of_rates(shape, 1.0, 1.0, 1.0), cluster=Cluster(1, 1))  # nothing to plan
        runtime = cls.of(RunConfig(shape, setup.cluster, None, process, setup.mesh.stage_layers, choose(setup)))
        runtime.add_parts(kernel=kernel)
        return runtime

    def __deepcopy__(self, memo: dict[int, object]) -> Runtime:
        """Return this state itself: a copied layer spec runs in the same process."""
        return self

    def add_parts(self, **parts: object) -> None:
        """Add fields of ``Parts`` by name, while the model or the optimizer is built."""
        self.parts = replace(self.parts, **parts)  # type: ignore[arg-type]

    @property
    def hdp(self) -> HdpConfig:
        """The settings of hybrid data parallelism, which must be on."""
        return self.run.get(HdpConfig)

    @property
    def slicing(self) -> Slicing:
        """The slicing of the current step's micro-batches."""
        chosen = None if self.step.batch is None else self.step.batch.plan.slicing
        return self.run.decision.finest if chosen is None else chosen

    @property
    def rank(self) -> int:
        """The HDP rank of this process."""
        assert self.parts.comm is not None, f"{self.parts.comm=}"
        return self.parts.comm.rank

    @property
    def device(self) -> torch.device:
        """The device that computes micro-batches."""
        on_cuda = self.run.process.on_cuda
        return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def reset_counts(self) -> None:
        """Reset the counts of messages and kernel calls, because an evaluation may have run since the last step."""
        if self.parts.comm is not None:
            self.parts.comm.stats.reset()
        self.parts.kernel_calls.num_forward = self.parts.kernel_calls.num_backward = 0

    def count_step(self) -> None:
        """Add the figures of the finished step to the totals."""
        batch, parts, totals = self.step.batch, self.parts, self.log.totals
        assert batch is not None and parts.comm is not None, f"{batch=} {parts.comm=}"
        mine = shards_of_rank(batch.plan.ranks, self.rank)
        counts = Counts() if parts.activations is None else parts.activations.take_counts()
        cost, speed = balanced_cost(self.run.decision), 1.0
        if parts.learner is not None:
            learned = parts.learner.at(batch.step_index)
            cost, speed = learned.of_stage(cost), learned.speeds[self.rank] if learned.speeds else 1.0
        totals.figures += RankStep(
            work_seconds=parts.clock.work_seconds(),
            planned_work=cost.both.rank_cost(mine, batch.lengths) / speed,
            num_micro_batches=mine.num_filled,
            num_tokens=int(mine.tokens.sum()),
            num_rows=sum(batch.row_counts),
            plan_wait_seconds=batch.wait_seconds,
            bytes_sent=parts.comm.stats.bytes_sent,
            attention_calls=parts.kernel_calls.num_forward + parts.kernel_calls.num_backward,
            kept_bytes=counts.kept_bytes,
            swapped_bytes=counts.swapped_bytes,
            recomputed_bytes=counts.recomputed_bytes,
            host_peak_bytes=0.0 if parts.link is None else parts.link.arena.peak_bytes,
            num_slices=self.slicing.num_slices,
            device_peak_bytes=parts.peak.end(),
            pass_seconds=parts.clock.pass_span(),
        )
        seconds = parts.clock.backward_seconds()
        for index, micro_batch in enumerate(batch.plan.ranks[self.rank]):
            if index in seconds and counts_for_pace(micro_batch, batch.plan.tokens_per_rank):
                self.log.pace.add(cost.backward.micro_batch_cost(micro_batch, batch.lengths), seconds[index])
        if batch.predicted is not None:
            totals.predicted_passes += batch.predicted.seconds - batch.predicted.update
            totals.predicted_update += batch.predicted.update
        totals.num_steps += 1
        totals.stale_steps += self.step.stale_steps
        totals.most_stale_steps = max(totals.most_stale_steps, self.step.stale_steps)
        totals.step_samples = len(batch.sample_ids)
        self.log.tokens_so_far += batch.num_tokens
        shape = self.run.shape
        if self.step.active_experts is not None:
            shape = shape.with_experts_per_token(self.step.active_experts)
            totals.active_experts += self.step.active_experts
        totals.model_flops += model_flops(shape, batch.lengths)
