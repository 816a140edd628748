"""``--moe-dts-steps`` and related flags: resolved values, and refusals before anything is built."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bytescale_ext.plan.experts.gate import DenseToSparse
from megatron.bytescale import features
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features.gate.flags import REFUSALS, GateOptions
from megatron.bytescale.features.gate.flags import resolve as resolve_gate
from tests.bytescale.features.activations.test_flags import parsed
from tests.bytescale.features.experts.test_flags import READY

FITTING = {**READY, "moe_router_load_balancing_type": "aux_loss", "moe_router_score_function": "softmax"}
ON = ("--moe-dts-steps", "100")


def plan_of(*words: str, **settings: Any) -> DenseToSparse:
    args = parsed(*words, **{**FITTING, **settings})
    features.check(args)
    return resolve(args).get(DenseToSparse)


def test_defaults_and_choices() -> None:
    assert plan_of(*ON) == DenseToSparse(2.0, 0.3, "exp", 100, 1e-3, 8)
    words = ["--moe-dts-temperature", "5", "1", "linear", "--moe-dts-threshold", "0.1,4"]
    assert plan_of(*ON, *words) == DenseToSparse(5.0, 1.0, "linear", 100, 0.1, 4)
    assert plan_of(*ON, "--moe-dts-noise", seed=77, moe_expert_slots=6).noise_seed == 77


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--moe-dts-temperature", "1", "2"], "--moe-dts-temperature 1 2: give two temperatures above 0"),
        (["--moe-dts-temperature", "2"], "--moe-dts-temperature 2: give two temperatures above 0"),
        (["--moe-dts-temperature", "2", "linear"], "--moe-dts-temperature 2 linear: give two temperatures above 0"),
        (["--moe-dts-temperature", "3", "2", "1"], "--moe-dts-temperature 3 2 1: give two temperatures above 0"),
        (["--moe-dts-temperature", "2", "1", "exp", "exp"], "--moe-dts-temperature 2 1 exp exp: give two"),
        (["--moe-dts-steps", "0"], "--moe-dts-steps 0 must be at least 1"),
        (["--moe-dts-threshold", "0.125"], "--moe-dts-threshold 0.125 must be above 0 and below 0.125"),
        (["--moe-dts-threshold", "0.1,1"], "--moe-dts-threshold 0.1,1: .* from --moe-router-topk 2 to 8"),
    ],
)
def test_values_out_of_range(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*ON, *words)


def test_the_last_router_may_be_that_of_one_expert() -> None:
    words = [*ON, "--moe-dts-threshold", "0.01,1"]
    assert plan_of(*words, moe_router_topk=1, moe_router_pre_softmax=True).most_experts == 1


@pytest.mark.parametrize(
    ("num_experts", "most", "backend", "tensor_parallel", "limit"),
    [
        (33, None, "deepep", 1, 32),
        (32, None, "deepep", 1, None),
        (33, None, "hybridep", 1, None),
        (64, 16, "deepep", 2, None),
        (64, 17, "deepep", 2, 16),
    ],
)
def test_deepep_takes_a_limited_number_of_choices(
    num_experts: int, most: int | None, backend: str, tensor_parallel: int, limit: int | None
) -> None:
    options = GateOptions(
        9, [2.0, 0.3], (0.001, most), False, num_experts, 2, 1, "flex", backend,
        tensor_model_parallel_size=tensor_parallel,
    )  # fmt: skip
    if limit is None:
        assert resolve_gate(options, cast(Any, None)).most_experts == (most or num_experts)
        return
    with pytest.raises(ValueError, match=rf"at most {limit} experts here: give --moe-dts-threshold 0\.001,{limit}, or"):
        resolve_gate(options, cast(Any, None))


def test_steps_switch_it_on() -> None:
    with pytest.raises(ValueError, match="--moe-dts-noise needs --moe-dts-steps"):
        plan_of("--moe-dts-noise")


REFUSED: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0, "moe_expert_rank_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True, "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True, "moe_paged_stash": True, "moe_router_num_groups": 2,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_fusion": True, "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_router_score_function": "sigmoid",
    "moe_flex_dispatcher_backend": "ncclep",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    flex = {"moe_token_dispatcher_type": "flex"} if name == "moe_flex_dispatcher_backend" else {}
    with pytest.raises(ValueError, match="--moe-dts-steps does not work with --moe-"):
        plan_of(*ON, **{name: REFUSED[name], **flex})


def test_every_row_is_tested() -> None:
    assert len(REFUSED) == len(REFUSALS)
    with pytest.raises(ValueError, match="--moe-dts-steps does not work with dense models"):
        plan_of(*ON, num_experts=None)
