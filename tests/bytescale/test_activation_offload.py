"""``--activation-policy offload`` with hybrid data parallelism: the limits of the plan, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from bytescale_ext.config import HdpConfig
from bytescale_ext.plan.activation import ActivationPlan
from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.planner import HdpPlanner
from megatron.bytescale.training import activations
from tests.bytescale.test_activation_flags import parsed

OFFLOAD = ("--activation-policy", "offload", "--host-memory-gb", "2")


def hdp_of(**changes: Any) -> HdpConfig:
    values = {"tokens_per_rank": 8192, "rows_multiple": 1, "longest_sequence": 65536, "num_ranks": 5}
    return HdpConfig(**{**values, "plans_offload": True, **changes})


def config_of(*words: str, hdp: HdpConfig | None = None, **settings: Any) -> activations.ActivationConfig:
    settings = {"hybrid_data_parallel": True, "seq_length": 65536, **settings}
    config = activations.activation_config(parsed(*OFFLOAD, *words, **settings), hdp or hdp_of())
    assert config is not None
    return config


def test_a_sequence_needs_fewer_ranks() -> None:
    offload = config_of("--host-link-gb-per-second", "500").offload
    assert offload is not None and offload.limits.num_layers == 8
    (ranks,) = offload.least_ranks([65536])
    assert ranks < 8 == -(-65536 // 8192)
    assert f"a sequence of 65536 tokens needs {ranks} ranks instead of 8" in offload.described()
    planner = HdpPlanner(5, 8192, offload.cost, balance="none", offload=offload.limits)
    plan = planner([65536, 100, 9000])
    check_step_plan(plan, [65536, 100, 9000], num_layers=8)
    assert max(one.num_tokens for rank in plan.ranks for one in rank) > 8192


def test_a_micro_batch_has_the_share_of_the_plan() -> None:
    config = config_of("--host-link-gb-per-second", "500")
    assert config.plan(config.largest, 0.75) == ActivationPlan("offload", 0.75, 0.0, 0.75, False, 2)
    assert config.plan(config.largest).is_off


def test_pipelines_share_host_memory_and_swap_all_layers() -> None:
    one = config_of("--host-link-gb-per-second", "500", hdp=hdp_of(num_ranks=8)).offload
    four = config_of(
        "--host-link-gb-per-second", "500", hdp=hdp_of(num_ranks=8, num_stages=2, balance="pp"),
        pipeline_model_parallel_size=2,
    ).offload  # fmt: skip
    assert one is not None and four is not None
    assert one.limits.host_bytes == 2e9
    # Two micro-batches in flight of four layers each, of which the plan counts two as swapped and all are.
    assert four.limits.num_layers == 4 and four.limits.host_bytes == 2e9 * 2 / 4
    share = float(four.limits.least_shares(np.array([12000.0]), 8192)[0])
    most = four.limits.most_tokens(np.array([65536.0]), 8192, four.cost.forward)[0]
    assert share > 0 and most > 8192


def test_a_link_that_is_too_slow_asks_for_something_else() -> None:
    with pytest.raises(
        ValueError, match=r"--seq-length 65536: a sequence of \d+ tokens, more than 5 ranks of 8192"
    ) as e:
        config_of("--host-link-gb-per-second", "0.01")
    assert "raising --host-memory-gb does not help, for the link is too slow" in str(e.value)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_host_budget_that_is_named_works(stages: int) -> None:
    hdp = hdp_of(num_ranks=5, num_stages=2, balance="pp") if stages == 2 else hdp_of()
    args = {"hdp": hdp, "pipeline_model_parallel_size": stages}
    fast = ("--host-link-gb-per-second", "500", "--host-memory-gb")
    with pytest.raises(ValueError, match="or give --host-memory-gb") as error:
        config_of(*fast, "0.1", **args)
    named = float(re.findall(r"--host-memory-gb ([\d.]+)$", str(error.value))[0])
    assert named > 0.1
    config_of(*fast, str(named), **args)
    with pytest.raises(ValueError, match="or give --host-memory-gb"):
        config_of(*fast, str(0.98 * named), **args)


@pytest.mark.parametrize(
    ("words", "settings", "hdp", "message"),
    [
        (("--device-memory-gb", "9"), {}, {}, "remove --device-memory-gb"),
        ((), {}, {"static_width": 5, "tokens_per_rank": 16384}, "--hdp-static-width"),
        ((), {"num_experts": 4, "moe_layer_freq": 1, "moe_router_topk": 1, "moe_ffn_hidden_size": 64,
              "moe_shared_expert_intermediate_size": None}, {}, "--num-experts"),
        ((), {"seq1f1b_splits": 4}, {}, "--seq1f1b-splits"),
        ((), {"pipeline_model_parallel_size": 4}, {"num_stages": 4, "balance": "pp"}, "use fewer pipeline stages"),
    ],
)  # fmt: skip
def test_where_eq_3_does_not_hold(
    words: tuple[str, ...], settings: dict[str, Any], hdp: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*words, hdp=hdp_of(**hdp), **settings)


def test_given_shares_leave_the_plan_alone() -> None:
    assert config_of("--swap-fraction", "0.5").offload is None
    plain = activations.activation_config(parsed(*OFFLOAD, "--swap-fraction", "0.5", hybrid_data_parallel=False), None)
    assert plain is not None and plain.offload is None
