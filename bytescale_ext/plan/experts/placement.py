"""The plan of one layer of experts: the experts in the slots of each rank, and how many of their tokens they compute.

FlexMoE (Nie et al. 2023, "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device Placement")
gives each device a fixed number of slots. Here an expert stays on its *home* rank, where its parameters, gradients and
optimizer states are; slots beyond the homes hold *replicas*, which borrow the weights. Homes are contiguous, as
Megatron lays experts out: rank r is the home of experts r E / R to (r + 1) E / R - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EMPTY: Final = -1
"""Stands for the expert of a slot that holds none."""

PARTS: Final = 1024
"""Quotas are so many parts of the tokens of an expert."""


@dataclass(frozen=True)
class PlacementPlan:
    """The slots of one layer on the ranks that share its experts.

    Attributes:
        num_experts: of the layer.
        slots: by rank, the expert of each slot: homes first, then replicas, then ``EMPTY``.
        quotas: by rank, the parts of that expert's tokens that each slot computes; all parts of an expert are
            ``PARTS``.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]
    quotas: tuple[tuple[int, ...], ...]

    @classmethod
    def static(cls, num_experts: int, num_ranks: int, num_slots: int) -> PlacementPlan:
        """Return the plan without replicas."""
        return cls.of(home_parts(num_experts, num_ranks), num_slots)

    @classmethod
    def of(cls, parts: Ints, num_slots: int) -> PlacementPlan:
        """Return a plan from parts [ranks, experts]; a rank that is not home holds an expert where it has parts."""
        homes = homes_of(parts.shape[1], parts.shape[0])
        slots: list[tuple[int, ...]] = []
        quotas: list[tuple[int, ...]] = []
        for home, mine in zip(homes, parts, strict=True):
            held = np.concatenate([np.flatnonzero(home), np.flatnonzero(~home & (mine > 0))])
            num_empty = num_slots - len(held)
            slots.append((*held.tolist(), *[EMPTY] * num_empty))
            quotas.append((*mine[held].tolist(), *[0] * num_empty))
        return cls(parts.shape[1], tuple(slots), tuple(quotas))

    @property
    def num_ranks(self) -> int:
        """How many ranks share the experts."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Slots of each rank."""
        return len(self.slots[0])

    @property
    def num_replicas(self) -> int:
        """Slots that hold an expert whose home is elsewhere."""
        return sum(expert != EMPTY for of_rank in self.slots for expert in of_rank) - self.num_experts

    def parts(self) -> Ints:
        """Return the parts of each expert on each rank: [ranks, experts]."""
        found = np.zeros((self.num_ranks, self.num_experts), np.int64)
        for rank, (experts, quotas) in enumerate(zip(self.slots, self.quotas, strict=True)):
            for expert, quota in zip(experts, quotas, strict=True):
                if expert != EMPTY:
                    found[rank, expert] += quota
        return found

    def changed_slots(self, before: PlacementPlan) -> int:
        """Return how many replicas there are that were not there before."""
        mine, earlier = (
            {(rank, expert) for rank, experts in enumerate(plan.slots) for expert in experts} for plan in (self, before)
        )
        return sum(expert != EMPTY for _, expert in mine - earlier)

    def described(self) -> str:
        """Return the printed plan, a line for each rank: experts, and the parts of them where they are not all."""
        lines = [f"{self.num_experts} experts in {self.num_slots} slots of each of {self.num_ranks} ranks"]
        for rank, (experts, quotas) in enumerate(zip(self.slots, self.quotas, strict=True)):
            words = [_slot_text(expert, quota) for expert, quota in zip(experts, quotas, strict=True)]
            lines.append(f"rank {rank}: {' '.join(words)}")
        return "\n".join(lines)


def _slot_text(expert: int, quota: int) -> str:
    if expert == EMPTY:
        return "-"
    return str(expert) if quota == PARTS else f"{expert}:{quota}/{PARTS}"


def homes_of(num_experts: int, num_ranks: int) -> Bools:
    """Return which rank is the home of which expert: [ranks, experts]."""
    return np.asarray(np.arange(num_ranks)[:, None] == np.arange(num_experts) * num_ranks // num_experts)


def home_parts(num_experts: int, num_ranks: int) -> Ints:
    """Return the parts [ranks, experts] of a layer without replicas."""
    return np.where(homes_of(num_experts, num_ranks), PARTS, 0)


def tokens_of_ranks(parts: Ints, loads: Sequence[int] | Ints) -> Ints:
    """Return the tokens of each expert that each rank computes: [ranks, experts].

    Token i of an expert with n tokens belongs to the rank in whose parts ``i PARTS / n`` lies, so the sum is exact.

    Args:
        parts: [ranks, experts].
        loads: [experts] tokens of each expert.
    """
    ends = parts.cumsum(0) * np.asarray(loads) // PARTS
    return np.asarray(np.diff(ends, axis=0, prepend=0))


def check_slots(flag: str, num_slots: int, num_experts: int, num_ranks: int) -> None:
    """Raise ValueError unless each rank has slots for the experts whose home it is, and no more than experts."""
    of_rank = num_experts // num_ranks
    if not of_rank <= num_slots <= num_experts:
        raise ValueError(
            f"{flag} {num_slots}: a rank is home of {of_rank} of {num_experts} experts, so it has at least {of_rank} "
            f"slots and at most {num_experts}"
        )
