"""Settings of hybrid data parallelism (ByteScale section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.hdp.table import auto_balance, planner_names, planner_row
from bytescale_ext.plan.step.sizes import Cluster

NORMALIZATIONS: Final = ("tokens", "documents", "groups")
"""What the loss of a step is a mean over: labels with a weight, or documents, or groups of documents, of the mean over
their labels."""


@dataclass(frozen=True)
class HdpConfig:
    """Configuration of hybrid data parallelism.

    Attributes:
        cluster: number of HDP ranks (Megatron's dp x cp domain), largest number of tokens of a micro-batch on a rank
            (C), and number of ranks per node, or None if HDP ranks do not fill nodes evenly.
        cost: cost that a planner balances: cost of micro-batches on the largest pipeline stage, in seconds or FLOPs.
        longest_sequence: longest possible sequence (``--seq-length``).
        rows_multiple: number to whose multiple the rows of micro-batches and slices are padded: 16 or 32 with FP8,
            else 1, times the tensor-parallel size under sequence parallelism. C is a multiple of it.
        balance: name of the planner (``plan.hdp.table``).
        num_stages: number of pipeline stages.
        expert_ranks: number of HDP ranks that share the experts of a layer (expert parallelism).
        expert_share: fraction of the linear part of ``cost`` that routed experts take.
        plan_ahead: number of steps that are planned and read ahead in the background.
        plan_seconds: time limit for the plan of one step, after which the simple plan is used; None means no limit.
        kernel: name of the attention kernel, or None to choose a kernel automatically.
        global_tokens: limit of the tokens of a training step, which takes the next documents; None counts documents.
        schedule: (documents trained on before, documents of a step from then on) if steps grow, else empty.
        static_width: width of a static context-parallel mesh to compare with, or None.
        log_dir: folder of metrics and timelines, or None.
        timeline_step: step at which a timeline is recorded, which needs ``log_dir``; or None.
        memory_step: step at which memory is measured, or None.
        plans_offload: whether plans may move activations to host memory (``--activation-policy offload``), so that
            ranks can process more than C tokens. ``PlannedOffload`` then checks that the longest sequence fits.
        loss_normalization: divisor of the loss of a step, one of ``NORMALIZATIONS``.
        learns_costs: whether plans follow costs and speeds of ranks that are learned while training.
        learned_costs: cost file to write them to, in addition to the file in ``log_dir``; or None.
    """

    cluster: Cluster
    cost: StageCost
    longest_sequence: int
    rows_multiple: int = 1
    balance: str = "dp"
    num_stages: int = 1
    expert_ranks: int = 1
    expert_share: float = 0.0
    plan_ahead: int = 2
    plan_seconds: float | None = None
    kernel: str | None = None
    global_tokens: int | None = None
    schedule: tuple[tuple[int, int], ...] = ()
    static_width: int | None = None
    log_dir: Path | None = None
    timeline_step: int | None = None
    memory_step: int | None = None
    plans_offload: bool = False
    loss_normalization: str = NORMALIZATIONS[0]
    learns_costs: bool = False
    learned_costs: Path | None = None

    def __post_init__(self) -> None:
        self._check_capacity()
        if self.plan_ahead < 1:
            raise ValueError(f"--hdp-plan-ahead must be at least 1, got {self.plan_ahead}")
        if self.plan_seconds is not None and self.plan_seconds <= 0:
            raise ValueError(f"--hdp-plan-seconds must be positive, got {self.plan_seconds:g}")
        if self.balance not in planner_names():
            raise ValueError(f"--hdp-balance {self.balance}: choose one of auto, {', '.join(planner_names())}")
        if self.aligned and not planner_row(self.balance).aligned:
            raise ValueError(
                f"--hdp-balance {self.balance} does not align slots, but pipelines and expert parallelism need aligned "
                f"micro-batches: use auto, which selects {auto_balance(aligned=True)}"
            )
        if self.global_tokens is not None and self.global_tokens < self.longest_sequence:
            raise ValueError(
                f"--hdp-global-tokens {self.global_tokens} is less than --seq-length {self.longest_sequence}, but the "
                "longest document must fit in a step"
            )
        if self.static_width is not None:
            self._check_static(self.static_width)
        if self.timeline_step is not None and self.log_dir is None:
            raise ValueError("--hdp-timeline-step needs --hdp-log-dir, the folder of the timeline")

    def _check_capacity(self) -> None:
        capacity, num_ranks = self.cluster.tokens_per_rank, self.cluster.num_ranks
        if capacity % self.rows_multiple:
            nearest = (capacity // self.rows_multiple + 1) * self.rows_multiple
            raise ValueError(
                f"--hdp-tokens-per-rank {capacity} is not a multiple of {self.rows_multiple}, as required by "
                "--sequence-parallel (--tensor-model-parallel-size) and --fp8-format (16 or 32); the next "
                f"multiple is {nearest}"
            )
        if not self.plans_offload and -(-self.longest_sequence // capacity) > num_ranks:
            raise ValueError(
                f"a sequence of --seq-length {self.longest_sequence} tokens needs "
                f"{-(-self.longest_sequence // capacity)} ranks of --hdp-tokens-per-rank {capacity}, and there are "
                f"{num_ranks}; the smallest --hdp-tokens-per-rank that fits is {self.smallest_capacity}"
            )

    def _check_static(self, width: int) -> None:
        if width < 1 or self.cluster.num_ranks % width:
            raise ValueError(f"--hdp-static-width {width} does not divide the {self.cluster.num_ranks} HDP ranks")
        if self.longest_sequence > width * self.cluster.tokens_per_rank:
            raise ValueError(
                f"--seq-length {self.longest_sequence} does not fit --hdp-static-width {width} x "
                f"--hdp-tokens-per-rank {self.cluster.tokens_per_rank}; raise one of them"
            )

    @property
    def aligned(self) -> bool:
        """Whether all ranks of a ring must have their sequence in the same micro-batch slot."""
        return self.num_stages > 1 or self.expert_ranks > 1

    @property
    def smallest_capacity(self) -> int:
        """Smallest C with which the longest sequence fits on all ranks together."""
        exact = -(-self.longest_sequence // self.cluster.num_ranks)
        return -(-exact // self.rows_multiple) * self.rows_multiple
