"""What the user asked for, as one frozen value made before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bytescale_ext.plan.planner import BALANCES


@dataclass(frozen=True)
class RemoteConfig:
    """Remote loading (ByteScale section 7): JSONL text, read and tokenized by Ray actors.

    Attributes:
        address: host:port of a Ray cluster, or None to start Ray on this machine.
        num_servers: actors that read and tokenize.
        server_tokens: tokens that each of them keeps at most.
        json_key: key of the text in each line.
    """

    address: str | None = None
    num_servers: int = 2
    server_tokens: int = 16_777_216
    json_key: str = "text"

    def __post_init__(self) -> None:
        if self.num_servers < 1:
            raise ValueError(f"--hdp-ray-servers must be at least 1, got {self.num_servers}")
        if self.server_tokens < 1:
            raise ValueError(f"--hdp-ray-server-tokens must be at least 1, got {self.server_tokens}")


@dataclass(frozen=True)
class HdpConfig:
    """Hybrid data parallelism (ByteScale section 5).

    Attributes:
        tokens_per_rank: C, the most tokens of a micro-batch on one rank.
        rows_multiple: micro-batches are padded at their end to a multiple of this many tokens (the tensor-parallel
            size under sequence parallelism, else 1); C is a multiple of it.
        longest_sequence: the longest sequence that can come (``--seq-length``).
        num_ranks: HDP ranks (Megatron's dp x cp domain).
        balance: what the planner balances: "none", "dp", "pp" or "bytescale" (``plan.planner.BALANCES``).
        num_stages: pipeline stages.
        num_slices: slices that each micro-batch is run in (Seq1F1B); 1: it is not cut.
        kept_keys: keys of rings' sequences up to this length are kept between slices; None: up to the length that
            costs no memory (``document_slices.affordable_tokens``).
        eager: slices run in the eager order (``plan.seq1f1b.SliceSchedule``).
        expert_ranks: HDP ranks that share the experts of a layer (expert parallelism).
        ranks_per_node: HDP ranks of a node, or None when they do not fill nodes evenly.
        cost_file: measured costs of the model (``bytescale profile``), or None to balance FLOPs.
        plan_ahead: steps planned and read ahead in the background.
        plan_seconds: time of the planner for one step, then the simple plan is taken; None: no limit.
        check_plans_every: steps after which all ranks compare their plans.
        kernel: attention kernel by name, or None to choose.
        static_width: None, or the width of a static context-parallel mesh to compare with.
        log_dir: where metrics and timelines go, or None.
        timeline_step: the step whose timeline is recorded (needs ``log_dir``), or None.
        remote: how text is loaded (``--hdp-loader ray``), or None to read Megatron's data sets.
        plans_offload: plans may move activations to host memory (``--activation-policy offload``), so that ranks hold
            more than C tokens; whether the longest sequence fits is found out where the limits are known.
    """

    tokens_per_rank: int
    rows_multiple: int
    longest_sequence: int
    num_ranks: int
    balance: str = "dp"
    num_stages: int = 1
    num_slices: int = 1
    kept_keys: int | None = None
    eager: bool = False
    expert_ranks: int = 1
    ranks_per_node: int | None = None
    cost_file: Path | None = None
    plan_ahead: int = 2
    plan_seconds: float | None = None
    check_plans_every: int = 100
    kernel: str | None = None
    static_width: int | None = None
    log_dir: Path | None = None
    timeline_step: int | None = None
    remote: RemoteConfig | None = None
    plans_offload: bool = False

    def __post_init__(self) -> None:
        capacity = self.tokens_per_rank
        if capacity < 1:
            raise ValueError(f"--hdp-tokens-per-rank must be positive, got {capacity}")
        if capacity % self.rows_multiple:
            nearest = (capacity // self.rows_multiple + 1) * self.rows_multiple
            raise ValueError(
                f"--hdp-tokens-per-rank {capacity} is not a multiple of --tensor-model-parallel-size "
                f"{self.rows_multiple}, which --sequence-parallel needs; the next that is: {nearest}"
            )
        if not self.plans_offload and -(-self.longest_sequence // capacity) > self.num_ranks:
            raise ValueError(
                f"a sequence of --seq-length {self.longest_sequence} tokens needs "
                f"{-(-self.longest_sequence // capacity)} ranks of --hdp-tokens-per-rank {capacity}, and there are "
                f"{self.num_ranks}; the smallest --hdp-tokens-per-rank that fits is {self.smallest_capacity}"
            )
        if self.plan_ahead < 1:
            raise ValueError(f"--hdp-plan-ahead must be at least 1, got {self.plan_ahead}")
        if self.plan_seconds is not None and self.plan_seconds <= 0:
            raise ValueError(f"--hdp-plan-seconds must be positive, got {self.plan_seconds:g}")
        if self.kept_keys is not None and (self.kept_keys < 0 or self.num_slices == 1):
            raise ValueError(
                f"--hdp-kept-keys must be at least 0, got {self.kept_keys}"
                if self.kept_keys < 0
                else "--hdp-kept-keys needs --seq1f1b-splits of 2 or more: keys are kept from slice to slice"
            )
        if self.check_plans_every < 1:
            raise ValueError(f"--hdp-check-plans-every must be at least 1, got {self.check_plans_every}")
        self._check_balance()
        if self.static_width is not None:
            self._check_static()
        if self.timeline_step is not None and self.log_dir is None:
            raise ValueError("--hdp-timeline-step needs --hdp-log-dir, the folder that it is written to")

    def _check_balance(self) -> None:
        if self.balance not in BALANCES:
            raise ValueError(f"--hdp-balance {self.balance}: choose one of auto, {', '.join(BALANCES)}")
        if self.balance == "dp" and self.aligned:
            raise ValueError(
                "--hdp-balance dp lets ranks drift apart, and pipelines and expert parallelism need their "
                "micro-batches in step: use auto, which is pp there"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"--hdp-ranks-per-node must be at least 1, got {self.ranks_per_node}")

    def _check_static(self) -> None:
        width = self.static_width or 0
        if width < 1 or self.num_ranks % width:
            raise ValueError(f"--hdp-static-width {width} does not divide the {self.num_ranks} HDP ranks")
        if self.longest_sequence > width * self.tokens_per_rank:
            raise ValueError(
                f"--seq-length {self.longest_sequence} does not fit --hdp-static-width {width} x "
                f"--hdp-tokens-per-rank {self.tokens_per_rank}; raise one of them"
            )

    @property
    def aligned(self) -> bool:
        """Ranks that share a sequence must have it in the same micro-batch slot."""
        return self.num_stages > 1 or self.expert_ranks > 1

    @property
    def smallest_capacity(self) -> int:
        """The smallest C with which the longest sequence fits on all ranks."""
        exact = -(-self.longest_sequence // self.num_ranks)
        return -(-exact // self.rows_multiple) * self.rows_multiple
