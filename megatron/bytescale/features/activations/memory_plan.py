"""The peak of a plan of ``bytescale memory-plan`` in training (MEMO section 4.2): reserved, not its addresses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.memory.plan_file import PlanFile
from bytescale_ext.plan.memory.step_file import ModelTraits, StepLayout, StepMemory, StepRecord
from bytescale_ext.plan.step.sizes import ONE_SLICE
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
        help="Reserve the peak of a plan of --record-memory-plan or `bytescale memory-plan --output FILE` at once, on "
        "a GPU; its addresses are not enforced. Swapped layers are read back into two buffers of the planned size. "
        "The plan must be of this model, step and layout of ranks.",
    )


def resolve(args: Any, run: RunConfig) -> StepMemory:
    """Return the plan of this rank.

    Raises ValueError where it cannot be read, is not a plan, or is for another model or step.
    """
    step = step_record(args, run, "--memory-plan")
    path: Path = args.memory_plan
    try:
        plans = PlanFile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--memory-plan {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--memory-plan {path}: {error}") from None
    memory = plans.plan_of(run.process.stage, run.process.tensor_rank)
    memory.check_serves(step, path)
    return memory


def step_record(args: Any, run: RunConfig, flag: str) -> StepRecord:
    """Return the settings of this rank's step. Raises ValueError where shares differ between micro-batches."""
    activations = run.get(ActivationConfig)
    chooses_shares = activations.policy.name != "none" and not activations.policy.has_shares
    if chooses_shares and run.find(HdpConfig) is not None:
        raise ValueError(f"{flag} needs one share for all micro-batches: give --swap-fraction, or remove it")
    load = activations.largest
    dtype = str(args.params_dtype).removeprefix("torch.")
    device = "cuda" if run.process.on_cuda else "cpu"
    chunks = run.find(LossChunks)
    shares, loss_tokens = activations.plan(load), None if chunks is None else chunks.num_tokens
    traits, layout = traits_of(args), layout_of(args, run)
    return StepRecord(run.shape, load.num_tokens, dtype, loss_tokens, shares, traits, device, layout)


def layout_of(args: Any, run: RunConfig) -> StepLayout:
    """Return how the ranks of a pipeline share a step."""
    slices, num_stages = run.find(SliceConfig), len(run.stage_layers)
    virtual = args.virtual_pipeline_model_parallel_size or 1
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return StepLayout(
        tensor_parallel=run.process.tensor_parallel,
        sequence_parallel=args.sequence_parallel,
        stage_layers=run.stage_layers if num_stages > 1 else (),
        virtual_stages=virtual,
        group_size=(args.microbatch_group_size_per_vp_stage or num_stages) if virtual > 1 else 0,
        overlapped_messages=virtual > 1 and args.overlap_p2p_comm,
        micro_batches=micro_batches if num_stages > 1 else 1,
        slices=slices.lengths if slices is not None else (),
        slicing=ONE_SLICE if slices is None else slices.slicing,
    )


def traits_of(args: Any) -> ModelTraits:
    """Return what decides the tensors of a step beside the sizes of the model."""
    is_learned = args.position_embedding_type == "learned_absolute"
    return ModelTraits(
        normalization=args.normalization,
        linear_biases=args.add_bias_linear,
        qkv_biases=args.add_qkv_bias or args.add_bias_linear,
        qk_norms=args.qk_layernorm,
        positions=args.position_embedding_type,
        learned_positions=args.max_position_embeddings if is_learned else 0,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        fused_activation=args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        transformer_impl=args.transformer_impl,
    )


def build(training: Training, runtime: Runtime) -> Training:
    """Take the planned memory before the first forward pass, and compare the first step with the plan."""
    from megatron.bytescale.features.activations.activation_memory import PlannedMemory

    return PlannedMemory.of(runtime).around(training)


_NOT_RECORDED = "remove it: memory plans do not tell whether their step had it"
_BOTH = "memory_plan memory_record"
REFUSALS = (
    refuse("--transformer-impl transformer_engine", _BOTH, "use local: its layers cannot be recorded yet",
           lambda args: args.transformer_impl == "transformer_engine"),
    refuse("--hybrid-data-parallel over tensor-parallel ranks, stages or slices", "memory_plan",
           "remove it: steps of documents differ, so a recorded step does not bound the next one",
           lambda args: args.hybrid_data_parallel and (
               args.tensor_model_parallel_size > 1 or args.pipeline_model_parallel_size > 1
               or args.seq1f1b_slices not in (None, 1))),
    refuse("--memory-plan", "memory_record", "remove one of them: a plan is recorded without another"),
    refuse("--hybrid-data-parallel", "memory_record",
           "remove it: `bytescale memory-plan` records the largest micro-batch of documents"),
    *(refuse(flag, _BOTH, "remove it: steps would have different numbers of micro-batches") for flag in (
        "--rampup-batch-size", "--step-batch-size-schedule", "--decrease-batch-size-if-needed")),
    *(refuse(flag, _BOTH, _NOT_RECORDED) for flag in (
        "--fp32-residual-connection", "--apply-residual-connection-post-layernorm", "--squared-relu", "--quick-geglu",
        "--cross-entropy-loss-fusion", "--attention-output-gate", "--qk-l2-norm", "--multi-latent-attention",
        "--num-experts")),
)  # fmt: skip

MEMORY_PLAN = Feature(
    name="memory_plan",
    flag="--memory-plan",
    summary="a memory plan of a step: memory reserved before the first step",
    add_arguments=add_arguments,
    is_on=lambda args: args.memory_plan is not None,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
