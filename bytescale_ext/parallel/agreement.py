"""Comparison of the plans of all ranks before a step, so that a step runs only if all plans are equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

_DIGITS = 12  # the first 48 bits of a digest, which fit in one int64


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of comparing the plans of a group of ranks.

    Attributes:
        same_plan: whether every rank has the same plan.
        fell_back: whether the planner of any rank ran out of time.
    """

    same_plan: bool
    fell_back: bool


def compare_plans(digest: str, fell_back: bool, group: dist.ProcessGroup | None, device: torch.device) -> Agreement:
    """Compare the plans of a group with one all-reduce of three integers.

    Args:
        digest: hexadecimal digest of this rank's plan.
        fell_back: whether this rank's planner ran out of time.
        group: ranks to compare, which must all call this function for the same step; None: every process of the job.
        device: device of the tensors that the group's backend sends.
    """
    number = int(digest[:_DIGITS], 16)
    largest = torch.tensor([number, -number, int(fell_back)], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    highest, negative_lowest, any_fell_back = largest.tolist()
    return Agreement(same_plan=highest == -negative_lowest, fell_back=bool(any_fell_back))


def digests_by_rank(digest: str, group: dist.ProcessGroup | None) -> dict[str, list[int]]:
    """Return the ranks of the group by their digest, for the message about plans that differ. Collective."""
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    ranks: dict[str, list[int]] = {}
    for rank, rank_digest in enumerate(digests):
        ranks.setdefault(rank_digest, []).append(rank)
    return ranks
