"""Tokens go to the same slots as in a token-by-token dispatch, for any source ranks."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from bytescale_ext.plan.experts.eplb import packed
from bytescale_ext.plan.experts.placement import PlacementPlan
from megatron.bytescale.core.transformer.moe.slots import SlotTable
from tests.harness import run_ranks
from tests.plan.experts.tokens import destinations

EXPERTS, RANKS, SLOTS, TOKENS = 6, 3, 4, 40


def a_plan(seed: int) -> PlacementPlan:
    rng = np.random.default_rng(seed)
    loads = rng.multinomial(200, rng.dirichlet([0.5] * EXPERTS), size=RANKS)
    return packed(PlacementPlan.static(EXPERTS, RANKS, SLOTS), loads)


def choices(seed: int, num_sources: int) -> list[torch.Tensor]:
    """Return the experts that each source chooses, [tokens, experts]. Numbers of tokens differ by source."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(num_sources, 1, EXPERTS, generator=generator)
    return list(torch.rand(num_sources, TOKENS, EXPERTS, generator=generator) < shares)


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_those_of_tokens_one_by_one(seed: int) -> None:
    plan, chosen = a_plan(seed), choices(seed, RANKS)
    table = SlotTable.of(plan, torch.device("cpu"))
    counts = torch.stack([of_source.sum(0) for of_source in chosen])
    expected = destinations(plan, counts.numpy())
    assert len(table.shared) > 1
    for source in range(RANKS):
        slots = table.destinations(chosen[source][:, table.shared], counts[:, table.shared], source)
        for column, expert in enumerate(table.shared.tolist()):
            mine = slots[chosen[source][:, expert], column]
            assert (mine // SLOTS).tolist() == expected[source, expert]
            assert all(plan.slots[slot // SLOTS][slot % SLOTS] == expert for slot in mine.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_two_sources_keep_the_quotas(seed: int) -> None:
    """With tensor parallelism several ranks send tokens from one expert-parallel rank."""
    plan, chosen = a_plan(seed), choices(seed, 2 * RANKS)
    table = SlotTable.of(plan, torch.device("cpu"))
    counts = torch.stack([of_source.sum(0) for of_source in chosen])
    of_ranks = counts.view(RANKS, 2, EXPERTS).sum(1).numpy()
    expected, found = destinations(plan, of_ranks), defaultdict(list)
    for source in range(2 * RANKS):
        slots = table.destinations(chosen[source][:, table.shared], counts[:, table.shared], source)
        for column, expert in enumerate(table.shared.tolist()):
            found[source // 2, expert] += (slots[chosen[source][:, expert], column] // SLOTS).tolist()
    for key, ranks in found.items():
        assert sorted(ranks) == sorted(expected[key])


def in_slots(rank: int, world: int) -> tuple[torch.Tensor, ...]:
    """Return the experts and slots that a rank chose, and the gradient of its probabilities."""
    chosen = choices(1, world)[rank]
    probs = (chosen * torch.rand(TOKENS, EXPERTS)).requires_grad_()
    table = SlotTable.of(a_plan(1), torch.device("cpu"))
    slot_probs, slots = table.in_slots(probs, chosen, torch.distributed.group.WORLD)
    slot_probs.sum().backward()
    assert probs.grad is not None
    return chosen, probs.detach(), slot_probs.detach(), slots, probs.grad


@pytest.mark.ranks
def test_each_choice_is_in_one_slot_with_its_probability() -> None:
    plan = a_plan(1)
    held = [expert for experts in plan.slots for expert in experts]
    for chosen, probs, slot_probs, slots, gradient in run_ranks(in_slots, RANKS):
        assert slots.shape == (TOKENS, RANKS * SLOTS)
        for expert in range(EXPERTS):
            mine = [slot for slot, one in enumerate(held) if one == expert]
            assert (slots[:, mine].sum(1) == chosen[:, expert]).all()
            assert torch.equal(slot_probs[:, mine].sum(1), probs[:, expert])
        assert not slots[:, [slot for slot, one in enumerate(held) if one < 0]].any()
        assert torch.equal(gradient, chosen.float())
