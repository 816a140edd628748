"""HDP ranks that share experts, against Megatron's own process groups."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from bytescale_ext.plan.schedule.actions import seq1f1b_schedule
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from megatron.bytescale.core.transformer.moe.expert_ranks import ranks_that_share_experts
from tests.harness import run_ranks
from tests.plan.simple_plans import plan_naive


def groups_of_megatron(
    rank: int, world: int, num_processes: int, tp_size: int, ep_size: int, etp_size: int | None, pp_size: int
) -> list[set[int]]:
    """Return the HDP ranks of each of Megatron's groups of (expert tensor, expert model) parallel ranks."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for process in range(num_processes):
        dist.init_process_group("fake", store=FakeStore(), rank=process, world_size=num_processes)
        parallel_state.initialize_model_parallel(
            tp_size,
            pp_size,
            expert_model_parallel_size=ep_size,
            expert_tensor_parallel_size=etp_size,
            create_gloo_process_groups=False,
        )
        hdp = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
        mine = parallel_state.get_expert_tensor_and_model_parallel_group()
        found.append((hdp, dist.get_process_group_ranks(mine)))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    hdp_rank = {process: hdp.index(process) for process, (hdp, _) in enumerate(found)}
    return [{hdp_rank[process] for process in group} for _, group in found]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_processes", "tp_size", "ep_size", "etp_size", "pp_size", "expected"),
    [
        (8, 1, 2, None, 1, 2),
        (8, 1, 4, None, 1, 4),
        (8, 1, 2, None, 2, 2),
        (8, 1, 2, 2, 1, 4),
        (8, 2, 2, None, 1, 2),
        (8, 2, 2, 1, 1, 1),
        (8, 2, 4, 1, 1, 2),
        (8, 4, 2, 1, 1, 1),
        (16, 2, 2, 2, 2, 2),
        (12, 2, 3, 1, 1, 3),  # three processes: a group ends in the middle of an HDP rank
    ],
)
def test_ranks_are_those_of_megatrons_groups(
    num_processes: int, tp_size: int, ep_size: int, etp_size: int | None, pp_size: int, expected: int
) -> None:
    sizes = {"tensor_model_parallel_size": tp_size, "expert_model_parallel_size": ep_size,
             "expert_tensor_parallel_size": etp_size}  # fmt: skip
    count = ranks_that_share_experts(SimpleNamespace(num_experts=12, **sizes))
    assert count == expected
    groups = run_ranks(groups_of_megatron, 1, num_processes, tp_size, ep_size, etp_size, pp_size, init_group=False)[0]
    reach = {rank: {rank} for rank in range(num_processes // tp_size // pp_size)}  # linked to it by any group
    for _ in reach:
        for group in groups:
            joined = set().union(*(reach[rank] for rank in group))
            reach.update(dict.fromkeys(joined, joined))
    assert all(
        members == set(range(rank - rank % count, rank - rank % count + count)) for rank, members in reach.items()
    )


def communication(plan: StepPlan, counts: tuple[int, ...], rank: int, expert_ranks: int, stage: int, num_stages: int,
                  num_layers: int = 2) -> Iterator[tuple[tuple[int, ...], tuple[object, ...]]]:  # fmt: skip
    """Return (participants, kind) of the exchanges of a rank's stage, in execution order."""
    first = rank - rank % expert_ranks
    group = tuple(range(first, first + expert_ranks))
    for kind, index, *_ in seq1f1b_schedule(num_stages, counts[rank]).stages[stage]:
        micro_batches = plan.ranks[rank]
        shards = micro_batches[index].shards if index < len(micro_batches) else ()
        rings = list(dict.fromkeys(shard.ring for shard in shards if len(shard.ring) > 1))
        passes = [(ring, ("ring", tuple(shard.seq for shard in shards if shard.ring == ring))) for ring in rings]
        layer_by_layer = [*passes, (group, ("experts", index))]
        if kind == "B":
            layer_by_layer.reverse()
        for layer in range(num_layers):
            yield from ((members, (kind, layer, *what)) for members, what in layer_by_layer)


def ends(plan: StepPlan, expert_ranks: int, stage: int, num_stages: int) -> bool:
    """Return whether all ranks finish when each exchange waits for all its participants."""
    counts = micro_batch_counts(plan, expert_ranks)
    rows = [list(communication(plan, counts, rank, expert_ranks, stage, num_stages)) for rank in range(plan.num_ranks)]
    done, moved = [0] * len(rows), True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if done[rank] == len(row):
                continue
            members, _ = row[done[rank]]
            if all(rows[other][done[other] : done[other] + 1] == [row[done[rank]]] for other in members):
                for other in members:
                    done[other] += 1
                moved = True
    return all(count == len(row) for count, row in zip(done, rows, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "num_stages"), [(0, 1), (0, 3), (1, 3)])
def test_aligned_plans_never_wait_in_a_circle(stage: int, num_stages: int) -> None:
    generator = np.random.default_rng(num_stages)
    stuck = 0
    for _ in range(20):
        lengths = generator.integers(1, 400, generator.integers(8, 24)).tolist()
        for expert_ranks in (2, 4):
            assert ends(plan_naive(lengths, 8, 64, aligned=True), expert_ranks, stage, num_stages), lengths
            stuck += not ends(plan_naive(lengths, 8, 64), expert_ranks, stage, num_stages)
    assert stuck > 20, "plans that are not aligned are the counter-example"
