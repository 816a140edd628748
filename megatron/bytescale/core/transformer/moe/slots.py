"""Sends tokens to slots: maps the choice of experts to a choice of slots on all ranks.

Slots are numbered rank by rank. Megatron's dispatcher sees each slot as an expert. An expert with several slots divides
its tokens by the quotas of the plan, counted over all ranks in the current micro-batch. A slot takes tokens up to its
quota: first tokens of its own rank, then tokens of the other ranks, rank by rank. So all ranks can compute every
token's slot from the counts alone (``plan.experts.placement.tokens_of_ranks``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bytescale_ext.parallel.upload import upload
from bytescale_ext.plan.experts.placement import EMPTY, PARTS, PlacementPlan


@dataclass(frozen=True)
class SlotTable:
    """A layer's placement as arrays on the device.

    Attributes:
        plan: placement plan of these arrays.
        experts: expert in each slot of all ranks, [slots]; 0 in empty slots, to which no tokens are sent.
        homes: home slot of each expert, [experts].
        shared: experts with more than one slot, [shared].
        slots: slot of each shared expert on each rank, [shared, ranks]; -1 if it has none there.
        ends: cumulative quota of each shared expert up to and including each rank, [ranks, shared].
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
        return cls(plan, *(upload(array, device) for array in arrays))

    def in_slots(
        self, probs: torch.Tensor, chosen: torch.Tensor, group: torch.distributed.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and choices [tokens, slots] from [tokens, experts]. Collective if experts share slots.

        ``group``: all ranks with tokens for these slots; ranks that share a slot's rank are adjacent.
        """
        slots = self.homes.expand(chosen.shape)
        if len(self.shared):
            mine = chosen[:, self.shared]
            counts = [torch.empty_like(self.shared) for _ in range(group.size())]
            torch.distributed.all_gather(counts, mine.sum(0), group=group)
            slots = slots.index_copy(1, self.shared, self.destinations(mine, torch.stack(counts), group.rank()))
        numbers = torch.arange(len(self.experts), device=slots.device)
        in_slot = chosen[:, self.experts] & (slots[:, self.experts] == numbers)
        return torch.where(in_slot, probs[:, self.experts], 0.0), in_slot

    def destinations(self, chosen: torch.Tensor, counts: torch.Tensor, source: int) -> torch.Tensor:
        """Return each token's slot for each shared expert, [tokens, shared]; undefined if the expert is not chosen.

        Args:
            chosen: choices of this source, bool [tokens, shared].
            counts: tokens of all sources, [sources, shared]; each rank has the same number of sources.
            source: index of this source.
        """
        num_ranks = self.plan.num_ranks
        rooms = torch.diff(self.ends * counts.sum(0) // PARTS, dim=0, prepend=torch.zeros_like(self.ends[:1]))
        by_rank = counts.view(num_ranks, -1, counts.shape[1])
        earlier = by_rank.cumsum(1) - by_rank  # tokens of earlier sources on the same rank
        local = torch.minimum((rooms[:, None] - earlier).clamp(min=0), by_rank)
        left = (rooms - local.sum(1)).cumsum(0)
        over = (by_rank - local).view(counts.shape)
        first = (over.cumsum(0) - over)[source]
        number = chosen.cumsum(0) - 1 - local.view(counts.shape)[source]  # index among the tokens that leave
        away = torch.searchsorted(left.T.contiguous(), (first + number).T.contiguous(), right=True).T
        rank = torch.where(number < 0, source * num_ranks // len(counts), away.clamp(max=num_ranks - 1))
        return self.slots.T.gather(0, rank)
