"""Process groups of pipeline stages: no process waits for other groups, and the reason why all processes make all."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

STAGES = (0, 1, 2)
SECONDS_TO_MEET = 2.0


def make_links(rank: int, world: int) -> list[tuple[int, ...]]:
    """Return the ranks of the groups of this stage, which it uses once. Other groups must not make it wait.

    Rank 0 makes all groups before the members of other groups begin to make their groups.
    """
    from megatron.bytescale.core import parallel_state

    store, make = dist.distributed_c10d._get_default_store(), dist.new_group

    def new_group(ranks: list[int], **settings: Any) -> Any:
        if 0 not in ranks:
            store.set("rank 0 is here", "") if rank == 0 else store.wait(["rank 0 is through"])
        group = make(ranks, **settings)
        if 0 not in ranks and rank == 0:
            store.set("rank 0 is through", "")
        return group

    dist.new_group = new_group
    mine = [pair for pair in pairwise(STAGES) if rank in pair]
    groups = parallel_state.own_groups("TEST", mine, torch.device("cpu"), timeout_minutes=5.0)
    for ranks, group in groups.items():
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        assert int(total) == sum(ranks)
    return list(groups)


@pytest.mark.ranks
def test_no_process_waits_for_groups_of_others() -> None:
    assert run_ranks(make_links, 3) == [[(0, 1)], [(0, 1), (1, 2)], [(1, 2)]]


def meet_locally(rank: int, world: int) -> list[str]:
    """Return the result for each link if a stage makes only its own links."""
    found = []
    for pair in pairwise(STAGES):
        if rank not in pair:
            continue
        try:
            timeout = timedelta(seconds=SECONDS_TO_MEET if pair == (1, 2) else 300)
            group = dist.new_group(list(pair), timeout=timeout, use_local_synchronization=True)
            dist.all_reduce(torch.tensor(rank), group=group)
            found.append("met")
        except RuntimeError:
            found.append("never met")
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_members_that_make_only_their_own_groups_do_not_meet() -> None:
    """Torch names such a group by its ranks and by the number of groups of a process, which differs by stage.

    If this test fails, torch has other names, and ``_own_groups`` may make only the groups of this process.
    """
    assert run_ranks(meet_locally, 3) == [["met"], ["met", "never met"], ["never met"]]
