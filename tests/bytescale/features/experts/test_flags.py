"""``--moe-expert-slots`` and related flags: resolved values, and refusals before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.config.experts import PlacementConfig
from bytescale_ext.plan.experts.cost import ExpertCost
from megatron.bytescale import features
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features.experts.flags import REFUSALS
from tests.bytescale.features.activations.test_flags import parsed
from tests.bytescale.features.experts.test_trace import EXPERTS

READY = {
    **EXPERTS, "moe_token_dispatcher_type": "alltoall", "gradient_accumulation_fusion": False, "fp8": None, "fp4": None,
    "overlap_moe_expert_parallel_comm": False, "moe_grouped_gemm": False,
}  # fmt: skip


def config_of(*words: str, **settings: Any) -> PlacementConfig:
    args = parsed(*words, **{**READY, **settings})
    features.check(args)
    return resolve(args).get(PlacementConfig)


def test_defaults() -> None:
    config = config_of("--moe-expert-slots", "6")
    assert (config.num_experts, config.num_ranks) == (8, 2)
    placing = config.placing
    assert (placing.placement, placing.num_slots, placing.threshold, placing.interval) == ("flexmoe", 6, 1.15, 1)
    weights = 3 * 1024 * 64
    assert placing.cost == ExpertCost(
        pytest.approx(6 * weights / 400e12), pytest.approx(2048 / 55e9), pytest.approx(2 * weights / 55e9)
    )


def test_all_can_be_chosen() -> None:
    words = ["--moe-expert-slots", "4", "--moe-placement", "eplb,7", "--moe-placement-threshold", "1.5"]
    config = config_of(*words, "--moe-placement-speeds", "100", "20")
    placing = config.placing
    assert not config.measures
    assert (placing.placement, placing.num_slots, placing.threshold, placing.interval) == ("eplb", 4, 1.5, 7)
    assert placing.cost.exchange_seconds == pytest.approx(2048 / 20e9)


@pytest.mark.parametrize(
    ("words", "measures"),
    [
        ([], True),
        (["--moe-placement", "eplb"], False),  # asks for no cost
        (["--moe-placement", "static"], False),
        (["--moe-placement-speeds", "400", "55"], False),
    ],
)
def test_speeds_that_are_not_given_are_measured_for_flexmoe(words: list[str], measures: bool) -> None:
    config = config_of("--moe-expert-slots", "6", *words)
    assert config.measures == measures
    found = ExpertCost(1.0, 2.0, 3.0)
    measured = config.with_cost(found)
    assert measured.placing == replace(config.placing, cost=found)
    assert not measured.measures
    assert (measured.num_experts, measured.num_ranks) == (8, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3"], "--moe-expert-slots 3: a rank is the home of 4 of 8 experts: give at least 4"),
        (["9"], "--moe-expert-slots 9: .* at most 8"),
        (["6", "--moe-placement-threshold", "0.5"], "--moe-placement-threshold 0.5 must be at least 1"),
        (["6", "--moe-placement-speeds", "0", "5"], "--moe-placement-speeds 0 5 must be positive"),
    ],
)
def test_values_out_of_range(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of("--moe-expert-slots", *words)


REFUSED: dict[str, Any] = {
    "expert_model_parallel_size": 1,
    "moe_expert_capacity_factor": 1.0, "moe_expert_rank_capacity_factor": 1.0, "moe_router_fusion": True,
    "moe_pad_expert_input_to_capacity": True, "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True, 
    "moe_paged_stash": True, "delay_wgrad_compute": True, "gradient_accumulation_fusion": True,
    "use_megatron_fsdp": True, "use_torch_fsdp2": True, "fp4": "e2m1", "fp8": "hybrid",
    "moe_grouped_gemm": True, "moe_flex_dispatcher_backend": "ncclep",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    # Biases are only in their own row, because without expert parallelism every run refuses them.
    flex = {"moe_token_dispatcher_type": "flex"} if name == "moe_flex_dispatcher_backend" else {}
    settings = {"add_bias_linear": name == "moe_grouped_gemm", name: REFUSED[name], **flex}
    with pytest.raises(ValueError, match="--moe-expert-slots does not work with"):
        config_of("--moe-expert-slots", "6", **settings)


def test_every_row_is_tested() -> None:
    assert len(REFUSED) == len(REFUSALS)
    config_of("--moe-expert-slots", "6")
    config_of("--moe-expert-slots", "6", moe_grouped_gemm=True, add_bias_linear=False, distributed_backend="nccl")


@pytest.mark.parametrize("settings", [{"num_experts": None}, {"mtp_num_layers": 1}, {"spec": ["a", "b"]}])
def test_what_is_not_counted_is_not_followed(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--moe-expert-slots does not work with"):
        config_of("--moe-expert-slots", "6", **settings)
