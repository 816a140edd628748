"""Plan of one layer of experts: the expert in each slot of each rank, and the fraction of its tokens computed there.

In FlexMoE (Nie et al. 2023, "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device
Placement") each device has a fixed number of slots. Here every expert also has a fixed *home* rank, which stores its
parameters, gradients and optimizer states. Further slots contain *replicas*, which receive a copy of the weights. As in
Megatron, the homes are contiguous: rank r is the home of experts r E / R to (r + 1) E / R - 1.
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
"""Marker of a slot without an expert."""

PARTS: Final = 1024
"""Number of parts into which the tokens of an expert are divided. A quota counts parts."""


@dataclass(frozen=True)
class PlacementPlan:
    """Slots of one layer on the ranks that share its experts.

    Attributes:
        num_experts: number of experts of the layer.
        slots: expert in each slot of each rank: homes first, then replicas, then ``EMPTY``.
        quotas: parts of the expert's tokens that each slot of each rank computes. The quotas of an expert sum to
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
        """Return the plan of parts, [ranks, experts]. A rank other than the home has a replica if it has parts."""
        homes = homes_of(parts.shape[1], parts.shape[0])
        slots: list[tuple[int, ...]] = []
        quotas: list[tuple[int, ...]] = []
        for is_home, rank_parts in zip(homes, parts, strict=True):
            held = np.concatenate([np.flatnonzero(is_home), np.flatnonzero(~is_home & (rank_parts > 0))])
            num_empty = num_slots - len(held)
            slots.append((*held.tolist(), *[EMPTY] * num_empty))
            quotas.append((*rank_parts[held].tolist(), *[0] * num_empty))
        return cls(parts.shape[1], tuple(slots), tuple(quotas))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the experts."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Number of slots of each rank."""
        return len(self.slots[0])

    @property
    def num_replicas(self) -> int:
        """Number of replicas on all ranks."""
        return sum(expert != EMPTY for experts in self.slots for expert in experts) - self.num_experts

    def parts(self) -> Ints:
        """Return the parts of each expert on each rank: [ranks, experts]."""
        parts = np.zeros((self.num_ranks, self.num_experts), np.int64)
        for rank, (experts, quotas) in enumerate(zip(self.slots, self.quotas, strict=True)):
            for expert, quota in zip(experts, quotas, strict=True):
                if expert != EMPTY:
                    parts[rank, expert] += quota
        return parts

    def changed_slots(self, before: PlacementPlan) -> int:
        """Return the number of replicas that did not exist in an earlier plan."""
        current, earlier = (
            {(rank, expert) for rank, experts in enumerate(plan.slots) for expert in experts} for plan in (self, before)
        )
        return sum(expert != EMPTY for _, expert in current - earlier)

    def described(self) -> str:
        """Return the plan as text with one line per rank. An expert that is shared is printed with its quota."""
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
    """Return whether each rank is the home of each expert: [ranks, experts]."""
    return np.asarray(np.arange(num_ranks)[:, None] == np.arange(num_experts) * num_ranks // num_experts)


def home_parts(num_experts: int, num_ranks: int) -> Ints:
    """Return the parts of a layer without replicas: [ranks, experts]."""
    return np.where(homes_of(num_experts, num_ranks), PARTS, 0)


def tokens_of_ranks(parts: Ints, loads: Sequence[int] | Ints) -> Ints:
    """Return the tokens of each expert that each rank computes: [ranks, experts].

    The parts of the ranks are laid end to end. Token i of an expert with n tokens belongs to the rank whose parts
    contain ``i PARTS / n``, so no token is lost to rounding.

    Args:
        parts: parts of each expert on each rank, [ranks, experts].
        loads: tokens of each expert, [experts].
    """
    ends = parts.cumsum(0) * np.asarray(loads) // PARTS
    return np.asarray(np.diff(ends, axis=0, prepend=0))


def check_slots(flag: str, num_slots: int, num_experts: int, num_ranks: int) -> None:
    """Raise ValueError unless a rank has a slot for each of its home experts, and no more slots than experts exist."""
    num_homes = num_experts // num_ranks
    if not num_homes <= num_slots <= num_experts:
        raise ValueError(
            f"{flag} {num_slots}: a rank is the home of {num_homes} of {num_experts} experts: give at least "
            f"{num_homes} slots and at most {num_experts}"
        )
