"""Compare the plans of all ranks, so that a step runs only if all ranks have the same plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

_DIGITS = 12  # hex digits of a digest in one int64 tensor entry; 48 bits


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of comparing plans over a group.

    Attributes:
        same_plan: every rank has the same plan.
        fell_back: the planner of some rank ran out of time.
    """

    same_plan: bool
    fell_back: bool


def agree(digest: str, fell_back: bool, group: dist.ProcessGroup | None, device: torch.device) -> Agreement:
    """Compare plans: one all-reduce of three integers over ``group`` (None: every process of the job).

    Args:
        digest: digest of this rank's plan, hexadecimal.
        fell_back: the planner of this rank ran out of time.
        group: every rank of it must call this function for the same step.
        device: the device of the tensors that the group's backend sends.
    """
    number = int(digest[:_DIGITS], 16)
    largest = torch.tensor([number, -number, int(fell_back)], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    highest, negative_lowest, any_fell_back = largest.tolist()
    return Agreement(same_plan=highest == -negative_lowest, fell_back=bool(any_fell_back))


def digests_by_rank(digest: str, group: dist.ProcessGroup | None) -> dict[str, list[int]]:
    """Return the ranks of the group that have each digest, for the message when they differ. Collective."""
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(digests):
        found.setdefault(one, []).append(rank)
    return found
