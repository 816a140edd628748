"""``--activation-policy offload`` with hybrid data parallelism: the limits of the plan, and refused settings."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale.arguments.resolve import resolve
from tests.bytescale.features.activations.test_flags import parsed

OFFLOAD = ("--activation-policy", "offload", "--host-memory-gb", "2")


def config_of(*words: str, num_ranks: int = 5, **settings: Any) -> ActivationConfig:
    stages = settings.get("pipeline_model_parallel_size", 1)
    hdp = {"hybrid_data_parallel": True, "hdp_tokens_per_rank": 8192, "seq_length": 65536}
    args = parsed(*OFFLOAD, *words, **{**hdp, "world_size": num_ranks * stages, **settings})
    return resolve(args).get(ActivationConfig)


def test_a_sequence_needs_fewer_ranks() -> None:
    offload = config_of("--link-gb-per-second", "500").decision.offload
    assert offload is not None
    assert offload.limits.num_layers == 8
    (ranks,) = offload.min_ranks([65536])
    assert ranks < 8 == -(-65536 // 8192)
    assert f"a sequence of 65536 tokens needs {ranks} ranks instead of 8" in offload.described()
    planner = HdpPlanner(Cluster(5, 8192), (offload.cost,), balance="none", offload=offload.limits)
    plan = planner([65536, 100, 9000])
    check_step_plan(plan, [65536, 100, 9000], num_layers=8)
    assert max(one.num_tokens for rank in plan.ranks for one in rank) > 8192


def test_a_micro_batch_has_the_share_of_the_plan() -> None:
    config = config_of("--link-gb-per-second", "500")
    assert config.plan(config.largest, 0.75) == ActivationPlan("offload", 0.75, 0.0, 0.75, False, 2)
    assert config.plan(config.largest).is_off


def test_pipelines_share_host_memory_and_swap_all_layers() -> None:
    one = config_of("--link-gb-per-second", "500", num_ranks=8).decision.offload
    four = config_of("--link-gb-per-second", "500", num_ranks=8, pipeline_model_parallel_size=2).decision.offload
    assert one is not None
    assert four is not None
    assert one.limits.host_bytes == 2e9
    # Two micro-batches of four layers are in flight. The plan counts two layers as swapped, but all are swapped.
    assert four.limits.num_layers == 4
    assert four.limits.host_bytes == 2e9 * 2 / 4
    share = float(four.limits.min_shares(np.array([12000.0]), 8192)[0])
    most = four.limits.max_tokens(np.array([65536.0]), 8192, four.cost.forward)[0]
    assert share > 0
    assert most > 8192


def test_a_link_that_is_too_slow_asks_for_something_else() -> None:
    with pytest.raises(
        ValueError, match=r"--seq-length 65536: a sequence of \d+ tokens, more than 5 ranks of 8192"
    ) as e:
        config_of("--link-gb-per-second", "0.01")
    assert "raising --host-memory-gb does not help, because the link is too slow" in str(e.value)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.slow
def test_the_host_budget_that_is_named_works(stages: int) -> None:
    args = {"pipeline_model_parallel_size": stages}
    fast = ("--link-gb-per-second", "500", "--host-memory-gb")
    with pytest.raises(ValueError, match="or give --host-memory-gb") as error:
        config_of(*fast, "0.1", **args)
    named = float(re.findall(r"--host-memory-gb ([\d.]+)$", str(error.value))[0])
    assert named > 0.1
    config_of(*fast, str(named), **args)
    with pytest.raises(ValueError, match="or give --host-memory-gb"):
        config_of(*fast, str(0.98 * named), **args)


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (("--device-memory-gb", "9"), {}, "remove --device-memory-gb"),
        ((), {"hdp_static_width": 5, "hdp_tokens_per_rank": 16384}, "--hdp-static-width"),
        ((), {"num_experts": 4, "moe_layer_freq": 1, "moe_router_topk": 1, "moe_ffn_hidden_size": 64,
              "moe_shared_expert_intermediate_size": None, "expert_tensor_parallel_size": None,
              "expert_model_parallel_size": 1}, "--num-experts"),
        ((), {"seq1f1b_slices": 4, "hdp_kept_keys": 0}, "--seq1f1b-slices"),
        ((), {"pipeline_model_parallel_size": 4}, "use fewer pipeline stages"),
    ],
)  # fmt: skip
def test_where_eq_3_does_not_hold(words: tuple[str, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*words, **settings)


def test_given_shares_leave_the_plan_alone() -> None:
    assert config_of("--swap-fraction", "0.5", seq_length=8192).decision.offload is None
    plain = config_of("--swap-fraction", "0.5", seq_length=8192, hybrid_data_parallel=False, hdp_tokens_per_rank=None)
    assert plain.decision.offload is None
