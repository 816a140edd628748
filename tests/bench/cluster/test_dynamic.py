"""Plans of a scheduler in another source tree of Megatron, as our plans: packs of sequences on the ranks of a ring."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.cli.shared.megatron_dynamic import SCHEDULER, check_source, source_of
from scripts.bench.cluster.dynamic import DynamicPlanner

# Two ranks share a pack of the longest sequence and all that fit with it; two ranks take one sequence each.
SOURCE = """
from megatron.core.extensions.transformer_engine import get_thd_partitioned_indices

def next_hdp_group_packing_aware(samples, total_gpus, max_seq_len_per_rank, min_cp_size=1):
    assert samples[0][1] <= 2 * max_seq_len_per_rank, "too long"
    assert [length for _, length in samples] == sorted((length for _, length in samples), reverse=True)
    pack, left = [samples[0]], list(samples[1:])
    for sample in list(left):
        if sum(length for _, length in pack) + sample[1] <= 2 * max_seq_len_per_rank and len(left) > 2:
            pack.append(sample)
            left.remove(sample)
    ids = [[seq for seq, _ in pack]] * 2 + [[left.pop(0)[0]] for _ in range(2)]
    return None, left, None, ids
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    file = tmp_path / SCHEDULER
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    return tmp_path


def test_ranks_of_a_ring_share_a_pack(tree: Path) -> None:
    lengths, planner = [7, 15, 8, 4], DynamicPlanner(Cluster(4, 10), tree)
    plan = planner(lengths)
    check_step_plan(plan, lengths)
    packs = [[[shard.seq for shard in batch.shards] for batch in rank] for rank in plan.ranks]
    assert packs == [[[1, 3]], [[1, 3]], [[2]], [[0]]]
    assert planner.fallback(lengths) == plan
    assert pickle.loads(pickle.dumps(planner)) == planner


def test_what_is_no_scheduler_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--megatron .*other: there is no megatron/core/datasets"):
        check_source(tmp_path / "other")
    check_source(tree)
    assert source_of(tree).startswith("data_schedule_utils.py ")
    with pytest.raises(ValueError, match="dynamic context parallelism: too long"):
        DynamicPlanner(Cluster(4, 10), tree)([21, 1, 1])
    empty = tmp_path / "empty"
    (empty / SCHEDULER).parent.mkdir(parents=True)
    (empty / SCHEDULER).write_text("")
    with pytest.raises(ValueError, match="has no dynamic context parallelism"):
        check_source(empty)
