from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config import HdpConfig
from bytescale_ext.data.loader import StepBatch
from bytescale_ext.data.packed import PackedMicroBatch
from bytescale_ext.metrics import RankStep, StepClock
from bytescale_ext.parallel.p2p import ExchangeStats
from bytescale_ext.plan.cost import flops_stage_cost
from bytescale_ext.plan.hdp import plan_naive, plan_static_cp
from bytescale_ext.plan.shapes import MicroBatch
from megatron.bytescale.runtime import HdpRuntime, model_shape

LENGTHS = (250, 3, 60, 130, 64)
ARGS = SimpleNamespace(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=48,
    swiglu=True,
    padded_vocab_size=128,
    num_experts=None,
)


def runtime(rank: int = 0, **changes: Any) -> HdpRuntime:
    values = {"tokens_per_rank": 64, "rows_multiple": 2, "longest_sequence": 256, "num_ranks": 4, **changes}
    made = HdpRuntime(HdpConfig(**values), flops_stage_cost(model_shape(ARGS), 1), StepClock(on_cuda=False))
    made.comm = SimpleNamespace(rank=rank, stats=ExchangeStats())  # type: ignore[assignment]
    return made


def packed(micro_batch: MicroBatch, num_rows: int) -> PackedMicroBatch:
    rows = torch.zeros(num_rows, dtype=torch.int64)
    names = tuple(f"docs: document {shard.seq}" for shard in micro_batch.shards)
    return PackedMicroBatch(rows, rows, rows, rows.float(), micro_batch, names)


def step_of(made: HdpRuntime, padding: int = 1) -> StepBatch:
    plan = made.planner()(LENGTHS)
    mine = tuple(packed(one, one.num_tokens + padding) for one in plan.ranks[made.rank])
    return StepBatch(0, tuple(range(len(LENGTHS))), LENGTHS, plan, mine, sum(LENGTHS), 0.0, 0.0, wait_seconds=0.25)


def test_planner_follows_the_configuration() -> None:
    assert runtime(balance="none").planner()(LENGTHS) == plan_naive(LENGTHS, 4, 64, 2)
    assert runtime(balance="pp", num_stages=2).planner()(LENGTHS).aligned
    assert runtime(static_width=4).planner()(LENGTHS) == plan_static_cp(LENGTHS, 4, 64, 4)
    assert runtime().planner()(LENGTHS) != runtime(static_width=4).planner()(LENGTHS)


def test_every_rank_plans_the_same() -> None:
    assert len({runtime(rank).planner()(LENGTHS).digest() for rank in range(4)}) == 1


def test_figures_of_a_step_are_counted_once() -> None:
    made = runtime(rank=1)
    assert made.comm is not None
    for steps in (1, 2):
        made.comm.stats.bytes_sent = made.kernel_calls.num_forward = 1_000_000  # of an evaluation in between
        made.reset_counts()
        made.step = step = step_of(made)
        made.comm.stats.bytes_sent = 1000
        made.kernel_calls.num_forward, made.kernel_calls.num_backward = 3, 4
        made.count_step()
        mine = step.plan.ranks[1]
        assert mine and made.num_steps == steps
    num_tokens = sum(micro_batch.num_tokens for micro_batch in mine)
    assert made.totals == RankStep(
        work_seconds=0.0,
        planned_work=2 * sum(made.cost.both.micro_batch_cost(micro_batch, LENGTHS) for micro_batch in mine),
        num_micro_batches=2 * len(mine),
        num_tokens=2 * num_tokens,
        num_rows=2 * (num_tokens + len(mine)),
        plan_wait_seconds=0.5,
        bytes_sent=2000,
        attention_calls=14,
    )
    assert made.totals.planned_work > 0


def test_all_ranks_together_count_every_token_once() -> None:
    totals = []
    for rank in range(4):
        made = runtime(rank)
        made.step = step_of(made)
        made.count_step()
        totals.append(made.totals.num_tokens)
    assert sum(totals) == sum(LENGTHS)


def test_documents_of_the_step_are_named_and_cut() -> None:
    made = runtime()
    names = [tuple(f"document {i}" for i in part) for part in ((3, 1), (2, 1), (), (5, 4))]
    made.step = SimpleNamespace(micro_batches=[SimpleNamespace(documents=part) for part in names])  # type: ignore[assignment]
    assert made.documents() == "document 1, document 2, document 3, document 4 and 1 more"
    assert made.documents(limit=9) == "document 1, document 2, document 3, document 4, document 5"
    made.step = SimpleNamespace(micro_batches=[])  # type: ignore[assignment]
    assert made.documents() == "padding only"


def test_use_before_the_model_is_built_is_our_bug() -> None:
    made = runtime()
    with pytest.raises(AssertionError, match="step"):
        made.documents()
    with pytest.raises(AssertionError):
        made.count_step()
    made.comm = None
    with pytest.raises(AssertionError, match="comm"):
        _ = made.rank


def test_device_is_the_clocks() -> None:
    assert runtime().device == torch.device("cpu")


def test_model_shape_with_and_without_query_groups() -> None:
    shape = model_shape(ARGS)
    assert (shape.num_kv_heads, shape.num_heads, shape.head_dim, shape.gated) == (2, 4, 8, True)
    # Megatron's num_query_groups is 1 where it is not used.
    plain = SimpleNamespace(**{**vars(ARGS), "group_query_attention": False, "num_query_groups": 1, "swiglu": False})
    shape = model_shape(plain)
    assert shape.num_kv_heads == 4 and shape.gated is False


@pytest.mark.parametrize("pattern, num_layers", [(1, 2), (2, 1), ([0, 1], 1), ([1, 1], 2)])
def test_model_shape_with_experts(pattern: Any, num_layers: int) -> None:
    given = {"num_experts": 8, "moe_layer_freq": pattern, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    args = SimpleNamespace(**{**vars(ARGS), **given, "moe_shared_expert_intermediate_size": None})
    shape = model_shape(args)
    assert (shape.num_expert_layers, shape.expert_ffn_hidden, shape.num_experts) == (num_layers, 48, 8)
    args.moe_shared_expert_intermediate_size = 10
    assert model_shape(args).expert_ffn_hidden == 58
