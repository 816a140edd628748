"""The memory plan of a training (MEMO section 4.2): its peak is reserved, its addresses are not enforced."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.json_input import json_settings, stored_text
from bytescale_ext.plan.memory.plan_file import PlanFile
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory, StepParallelism, StepRecord
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale.arguments.conditions import IS_CUT, above, chosen, equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the memory plan."""
    group = parser.add_argument_group("bytescale: memory plan")
    group.add_argument(
        "--memory-plan",
        type=Path,
        metavar="FILE",
        help="On a GPU, reserve the peak of a plan of --record-memory-plan or `bytescale memory-plan --output FILE` "
        "before the first step; its addresses are not enforced. Swapped layers are read back into two buffers of the "
        "planned size. The plan must match this run's model, step and layout of ranks.",
    )


@dataclass(frozen=True)
class StepArguments:
    """Megatron's arguments, under the same names, that determine a step's tensors and how ranks share it.

    Megatron's checks set the arguments that have a default here.
    """

    global_batch_size: int
    micro_batch_size: int
    sequence_parallel: bool
    normalization: str
    add_bias_linear: bool
    add_qkv_bias: bool
    qk_layernorm: bool
    position_embedding_type: str
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    swiglu: bool
    bias_swiglu_fusion: bool
    bias_gelu_fusion: bool
    transformer_impl: str
    overlap_p2p_comm: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    data_parallel_size: int = 1


@dataclass(frozen=True, kw_only=True)
class MemoryPlanOptions(StepArguments):
    """The flag of a memory plan, and the arguments that determine its step."""

    memory_plan: Path


def resolve(options: MemoryPlanOptions, run: RunConfig) -> StepMemory:
    """Return the memory plan of this rank.

    Raises ValueError if the file cannot be read, is not a plan, or belongs to another model or step.
    """
    step, path = step_record(options, run, "--memory-plan"), options.memory_plan
    try:
        plans = PlanFile.from_json(json_settings(stored_text(path)))
    except OSError as error:
        raise ValueError(f"--memory-plan {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--memory-plan {path}: {error}") from None
    memory = plans.plan_of(run.process.stage, run.process.tensor_rank)
    memory.check_serves(step, path)
    return memory


def step_record(step: StepArguments, run: RunConfig, flag: str) -> StepRecord:
    """Return the settings of this rank's step. Raises ValueError if shares differ between micro-batches."""
    activations = run.get(ActivationConfig)
    chooses_shares = activations.policy.name != "none" and not activations.policy.has_shares
    if chooses_shares and run.find(HdpConfig) is not None:
        raise ValueError(f"{flag} needs one share for all micro-batches: give --swap-fraction, or remove it")
    load = activations.largest
    dtype = str(run.process.dtype).removeprefix("torch.")
    device = "cuda" if run.process.on_cuda else "cpu"
    chunks = run.find(LossChunks)
    shares, loss_tokens = activations.plan(load), None if chunks is None else chunks.num_tokens
    traits, layout = traits_of(step), parallelism_of(step, run)
    return StepRecord(run.shape, load.num_tokens, dtype, loss_tokens, shares, traits, device, layout)


def parallelism_of(step: StepArguments, run: RunConfig) -> StepParallelism:
    """Return the division of a step among the ranks of a pipeline."""
    slices, num_stages = run.find(SliceConfig), len(run.stage_layers)
    virtual = run.decision.setup.mesh.virtual_stages
    micro_batches = step.global_batch_size // (step.micro_batch_size * step.data_parallel_size)
    return StepParallelism(
        tensor_parallel=run.process.tensor_parallel,
        sequence_parallel=step.sequence_parallel,
        stage_layers=run.stage_layers if num_stages > 1 else (),
        virtual_stages=virtual,
        group_size=(step.microbatch_group_size_per_vp_stage or num_stages) if virtual > 1 else 0,
        overlapped_messages=virtual > 1 and step.overlap_p2p_comm,
        micro_batches=micro_batches if num_stages > 1 else 1,
        slices=slices.lengths if slices is not None else (),
        slicing=ONE_SLICE if slices is None else slices.slicing,
    )


def traits_of(step: StepArguments) -> ModelTraits:
    """Return the model's traits that, in addition to its sizes, determine the tensors of a step."""
    is_learned = step.position_embedding_type == "learned_absolute"
    return ModelTraits(
        normalization=step.normalization,
        linear_biases=step.add_bias_linear,
        qkv_biases=step.add_qkv_bias or step.add_bias_linear,
        qk_norms=step.qk_layernorm,
        positions=step.position_embedding_type,
        learned_positions=step.max_position_embeddings if is_learned else 0,
        tied_embeddings=not step.untie_embeddings_and_output_weights,
        fused_activation=step.bias_swiglu_fusion if step.swiglu else step.bias_gelu_fusion,
        transformer_impl=step.transformer_impl,
    )


def build(training: Training, runtime: Runtime) -> Training:
    """Reserve the planned memory before the first forward pass, and compare the first step with the plan."""
    from megatron.bytescale.features.activations.activation_memory import PlannedMemory

    return PlannedMemory.of(runtime).around(training)


_NOT_RECORDED = "remove it: memory plans do not record this setting"
_BOTH = "memory_plan memory_record"
REFUSALS = (
    refuse("--transformer-impl transformer_engine", _BOTH, "use local: its layers cannot be recorded yet",
           equals("transformer_impl", "transformer_engine")),
    refuse("--hybrid-data-parallel over tensor-parallel ranks, stages or slices", "memory_plan",
           "remove it: steps of documents differ, so a recorded step does not bound the next one",
           given("hybrid_data_parallel")
           & (above("tensor_model_parallel_size", 1) | above("pipeline_model_parallel_size", 1) | IS_CUT)),
    refuse("--memory-plan", "memory_record", "remove one of them: a plan is recorded without another"),
    refuse("--hybrid-data-parallel", "memory_record",
           "remove it: `bytescale memory-plan` records the largest micro-batch of documents"),
    *(refuse(flag, _BOTH, "remove it: steps would have different numbers of micro-batches") for flag in (
        "--rampup-batch-size", "--step-batch-size-schedule", "--decrease-batch-size-if-needed")),
    *(refuse(flag, _BOTH, _NOT_RECORDED) for flag in (
        "--fp32-residual-connection", "--apply-residual-connection-post-layernorm", "--squared-relu", "--quick-geglu",
        "--cross-entropy-loss-fusion", "--attention-output-gate", "--qk-l2-norm", "--multi-latent-attention",
        "--num-experts", "--qk-clip", "--log-max-attention-logit")),
)  # fmt: skip

MEMORY_PLAN = Feature(
    name="memory_plan",
    flag="--memory-plan",
    summary="a memory plan of a step: memory reserved before the first step",
    add_arguments=add_arguments,
    is_on=chosen("memory_plan"),
    options=MemoryPlanOptions,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
