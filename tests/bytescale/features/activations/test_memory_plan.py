"""``--memory-plan``: a plan of this model and step is accepted, any other plan is refused before training."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.memory.plan_file import PlanFile
from bytescale_ext.plan.memory.step_file import StepMemory, StepParallelism
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features import refusals
from megatron.bytescale.features.activations.memory_plan import MEMORY_PLAN, parallelism_of
from tests.bytescale.features.activations.test_activation_memory import MEMORY, RECORD
from tests.bytescale.features.activations.test_flags import MEMO
from tests.bytescale.features.activations.test_flags import parsed as parsed_with

parsed = partial(parsed_with, normalization="RMSNorm")
POLICY = (*MEMO, "--swap-fraction", "0.25")


def write(path: Path, memory: StepMemory = MEMORY) -> str:
    path.write_text(json.dumps(memory.to_json()))
    return str(path)


def test_a_plan_of_this_model_is_taken(tmp_path: Path) -> None:
    words = (*POLICY, "--memory-plan", write(tmp_path / "plan.json"))
    assert resolve(parsed(*words)).get(StepMemory) == MEMORY
    plain = write(tmp_path / "plain.json", replace(MEMORY, record=replace(RECORD, activations=ActivationPlan("none"))))
    without_policy = resolve(parsed("--memory-plan", plain))
    assert without_policy.find(StepMemory) is not None
    config = without_policy.get(ActivationConfig)
    assert config.plan(config.largest).is_off


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 512}, "for another model or step: hidden is 1024 there and 512 here"),
        ({"seq_length": 16384}, "it is for 8192 tokens and micro-batches have up to 16384"),
        ({"chunked_cross_entropy": 64}, "--chunked-cross-entropy is None there and 64 here"),
        ({"swap_fraction": 0.5}, "the swap of activations is 0.25 there and 0.5 here"),
        ({"normalization": "LayerNorm"}, "normalization is RMSNorm there and LayerNorm here"),
        ({"add_bias_linear": False, "add_qkv_bias": True}, "step: linear_biases is True there and False here; record"),
    ],
)
def test_a_plan_of_another_model_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parsed(*POLICY, "--memory-plan", write(tmp_path / "p.json"), **settings))


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    for name, message in (
        ("missing.json", "cannot be read"),
        ("text.json", "text.json: "),
        ("other.json", "not a mem"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(parsed(*POLICY, "--memory-plan", str(tmp_path / name)))


def test_shares_of_the_plan_of_documents_do_not_go_with_it(tmp_path: Path) -> None:
    words = ("--activation-policy", "offload", "--host-memory-gb", "2", "--memory-plan", write(tmp_path / "p.json"))
    with pytest.raises(ValueError, match=r"--memory-plan needs one share for all micro-batches"):
        resolve(parsed(*words, hybrid_data_parallel=True, hdp_tokens_per_rank=8192))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hybrid_data_parallel": True, "tensor_model_parallel_size": 2},
            "--hybrid-data-parallel over tensor-parallel ranks, stages or slices: remove it: steps of documents differ",
        ),
        (
            {"step_batch_size_schedule": "0:2"},
            "--step-batch-size-schedule: remove it: steps would have different numbers",
        ),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine: use local"),
        ({"qk_clip": True}, "--qk-clip: remove it"),
        ({"num_experts": 4, "add_bias_linear": False}, "--num-experts: remove it"),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--memory-plan does not work with {message}"):
        refuse_conflicts(parsed(*POLICY, **settings), {"memory_plan": "--memory-plan"}, refusals())


@pytest.mark.parametrize(
    "settings",
    [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"seq1f1b_slices": 2},
     {"hybrid_data_parallel": True}],
)  # fmt: skip
def test_samples_may_be_on_any_ranks_and_documents_on_single_ones(settings: dict[str, Any]) -> None:
    refuse_conflicts(parsed(*POLICY, **settings), {"memory_plan": "--memory-plan"}, refusals())


PIPELINE = {
    "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "world_size": 8, "data_parallel_size": 2,
    "global_batch_size": 8, "sequence_parallel": True,
}  # fmt: skip
LAYOUT = StepParallelism(2, True, (4, 4), micro_batches=4)


def test_the_layout_is_that_of_a_pipeline() -> None:
    step = MEMORY_PLAN.read(parsed(*POLICY, "--memory-plan", "plan.json", **PIPELINE))
    run = resolve(parsed(*POLICY, **PIPELINE))
    assert parallelism_of(step, run) == LAYOUT
    setup = run.decision.setup
    virtual = replace(setup, mesh=replace(setup.mesh, virtual_stages=2))
    overlapped = replace(step, overlap_p2p_comm=True, microbatch_group_size_per_vp_stage=4)
    in_virtual_stages = replace(LAYOUT, virtual_stages=2, group_size=4, overlapped_messages=True)
    assert parallelism_of(overlapped, replace(run, decision=replace(run.decision, setup=virtual))) == in_virtual_stages
    eager = Slicing(2, eager=True)
    sliced = run.with_feature("slices", SliceConfig(eager, (4096, 4096), 2))
    assert parallelism_of(step, sliced) == replace(LAYOUT, slices=(4096, 4096), slicing=eager)
    alone = parsed(*POLICY, global_batch_size=8)
    assert (
        parallelism_of(MEMORY_PLAN.read(alone), resolve(alone)) == StepParallelism()
    )  # one by one, for any number of micro-batches


def test_each_rank_takes_the_plan_of_its_stage(tmp_path: Path) -> None:
    record = replace(RECORD, layout=LAYOUT)
    last = replace(MEMORY, record=record, buffer_bytes=99)
    waiting = replace(RECORD.activations, resident_layers=0)  # other micro-batches run before the backward pass
    first = replace(MEMORY, record=replace(record, activations=waiting))
    file = PlanFile(((0, 0), (1, 1)), (first, last))
    (tmp_path / "plans.json").write_text(json.dumps(file.to_json()))
    words = (*POLICY, "--memory-plan", str(tmp_path / "plans.json"))
    for rank, plan in ((0, first), (3, first), (4, last), (7, last)):  # the first four processes are stage 0
        assert resolve(parsed(*words, **PIPELINE, rank=rank)).get(StepMemory).buffer_bytes == plan.buffer_bytes
    for change, message in (
        ({"global_batch_size": 16}, "micro_batches is 4 there and 8 here"),
        ({"sequence_parallel": False}, "sequence_parallel is True there and False here"),
        ({"tensor_model_parallel_size": 1, "data_parallel_size": 4}, "tensor_parallel is 2 there and 1 here"),
        ({"pipeline_model_parallel_size": 1}, r"stage_layers is \(4, 4\) there and \(\) here"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(parsed(*words, **{**PIPELINE, **change}))
