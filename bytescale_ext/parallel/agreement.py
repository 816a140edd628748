"""All ranks run the same plan, or none does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

_DIGITS = 12  # hex digits of a digest in one int64 tensor entry; 48 bits


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a group said of their plans.

    Attributes:
        same_plan: every rank has the same plan.
        fell_back: some rank's planner ran out of its time.
    """

    same_plan: bool
    fell_back: bool


def agree(digest: str, fell_back: bool, group: dist.ProcessGroup | None, device: torch.device) -> Agreement:
    """Compare plans: one all-reduce of three integers over ``group`` (None: every process of the job).

    Args:
        digest: of this rank's plan, hexadecimal.
        fell_back: this rank's planner ran out of its time.
        group: every rank of it must call this for the same step.
        device: where the group's backend communicates from.
    """
    number = int(digest[:_DIGITS], 16)
    largest = torch.tensor([number, -number, int(fell_back)], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    highest, negative_lowest, any_fell_back = largest.tolist()
    return Agreement(same_plan=highest == -negative_lowest, fell_back=bool(any_fell_back))


def digests_by_rank(digest: str, group: dist.ProcessGroup | None) -> dict[str, list[int]]:
    """Which ranks of the group have which digest: for the message once they differ. Collective."""
    everyones: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(everyones, digest, group=group)
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(everyones):
        found.setdefault(one, []).append(rank)
    return found
