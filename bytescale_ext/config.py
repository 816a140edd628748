"""What the user asked for, as one frozen value made before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HdpConfig:
    """Hybrid data parallelism (ByteScale section 5).

    Attributes:
        tokens_per_rank: C, the most tokens of a micro-batch on one rank.
        rows_multiple: micro-batches are padded at their end to a multiple of this many tokens (the tensor-parallel
            size under sequence parallelism, else 1); C is a multiple of it.
        longest_sequence: the longest sequence that can come (``--seq-length``).
        num_ranks: HDP ranks (Megatron's dp x cp domain).
        plan_ahead: steps planned and read ahead in the background.
        kernel: attention kernel by name, or None to choose.
        static_width: None, or the width of a static context-parallel mesh to compare with.
        log_dir: where metrics and timelines go, or None.
        timeline_step: the step whose timeline is recorded (needs ``log_dir``), or None.
    """

    tokens_per_rank: int
    rows_multiple: int
    longest_sequence: int
    num_ranks: int
    plan_ahead: int = 2
    kernel: str | None = None
    static_width: int | None = None
    log_dir: Path | None = None
    timeline_step: int | None = None

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
        if -(-self.longest_sequence // capacity) > self.num_ranks:
            raise ValueError(
                f"a sequence of --seq-length {self.longest_sequence} tokens needs "
                f"{-(-self.longest_sequence // capacity)} ranks of --hdp-tokens-per-rank {capacity}, and there are "
                f"{self.num_ranks}; the smallest --hdp-tokens-per-rank that fits is {self.smallest_capacity}"
            )
        if self.plan_ahead < 1:
            raise ValueError(f"--hdp-plan-ahead must be at least 1, got {self.plan_ahead}")
        if self.static_width is not None:
            self._check_static()
        if self.timeline_step is not None and self.log_dir is None:
            raise ValueError("--hdp-timeline-step needs --hdp-log-dir, the folder that it is written to")

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
    def smallest_capacity(self) -> int:
        """The smallest C with which the longest sequence fits on all ranks."""
        exact = -(-self.longest_sequence // self.num_ranks)
        return -(-exact // self.rows_multiple) * self.rows_multiple
