"""Send tokens to slots: a map of tokens to experts becomes one of tokens to the slots of all ranks.

Slots are numbered rank by rank. To Megatron's dispatcher each of them is an expert. An expert in several slots shares
its tokens out by the quotas of the plan, counted over all ranks in this very micro-batch: a slot has room for its
quota, tokens on its own rank come first, and the others fill the rooms that are left, rank by rank. So all ranks know
from the counts alone where each token goes (``plan.experts.placement.tokens_of_ranks``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bytescale_ext.plan.experts.placement import EMPTY, PARTS, PlacementPlan


@dataclass(frozen=True)
class SlotTable:
    """A placement as arrays on the device, for one layer.

    Attributes:
        plan: which it shows.
        experts: [slots] of all ranks; 0 in empty slots, to which nothing is sent.
        homes: [experts] the slot that is an expert's home.
        shared: [shared] experts in more than one slot.
        slots: [shared, ranks] their slot on each rank, -1 where there is none.
        ends: [ranks, shared] their parts up to and including each rank.
    """

    plan: PlacementPlan
    experts: torch.Tensor
    homes: torch.Tensor
    shared: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, plan: PlacementPlan, device: torch.device) -> SlotTable:
        """Return the arrays of a plan."""
        experts = torch.tensor(plan.slots).flatten()
        where = torch.full((plan.num_experts, plan.num_ranks), -1)
        for slot, expert in enumerate(experts.tolist()):
            if expert != EMPTY:
                where[expert, slot // plan.num_slots] = slot
        ranks = torch.arange(plan.num_experts) * plan.num_ranks // plan.num_experts
        shared = ((where >= 0).sum(1) > 1).nonzero().flatten()
        arrays = (
            experts.clamp(min=0),
            where[torch.arange(plan.num_experts), ranks],
            shared,
            where[shared],
            torch.from_numpy(plan.parts()).cumsum(0)[:, shared],
        )
        return cls(plan, *(array.to(device) for array in arrays))

    def in_slots(
        self, probs: torch.Tensor, chosen: torch.Tensor, group: torch.distributed.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and choices [tokens, slots] from those [tokens, experts]. Collective if slots share.

        ``group``: all ranks with tokens for these slots, those of one slot's rank side by side.
        """
        slots = self.homes.expand(chosen.shape)
        if len(self.shared):
            mine = chosen[:, self.shared]
            counts = [torch.empty_like(self.shared) for _ in range(group.size())]
            torch.distributed.all_gather(counts, mine.sum(0), group=group)
            slots = slots.index_copy(1, self.shared, self.destinations(mine, torch.stack(counts), group.rank()))
        in_slot = chosen[:, self.experts] & (slots[:, self.experts] == torch.arange(len(self.experts)).to(slots.device))
        return torch.where(in_slot, probs[:, self.experts], 0.0), in_slot

    def destinations(self, chosen: torch.Tensor, counts: torch.Tensor, source: int) -> torch.Tensor:
        """Return the slot [tokens, shared] of each token for each shared expert; what was not chosen does not count.

        Args:
            chosen: bool [tokens, shared], of this source.
            counts: [sources, shared] tokens of all sources, equally many of which are on each rank.
            source: the number of this one.
        """
        num_ranks = self.plan.num_ranks
        rooms = torch.diff(self.ends * counts.sum(0) // PARTS, dim=0, prepend=torch.zeros_like(self.ends[:1]))
        by_rank = counts.view(num_ranks, -1, counts.shape[1])
        earlier = by_rank.cumsum(1) - by_rank  # tokens of sources before on the same rank
        local = torch.minimum((rooms[:, None] - earlier).clamp(min=0), by_rank)
        left = (rooms - local.sum(1)).cumsum(0)
        over = (by_rank - local).view(counts.shape)
        first = (over.cumsum(0) - over)[source]
        number = chosen.cumsum(0) - 1 - local.view(counts.shape)[source]  # of this source's tokens that leave
        away = torch.searchsorted(left.T.contiguous(), (first + number).T.contiguous(), right=True).T
        rank = torch.where(number < 0, source * num_ranks // len(counts), away.clamp(max=num_ranks - 1))
        return self.slots.T.gather(0, rank)
