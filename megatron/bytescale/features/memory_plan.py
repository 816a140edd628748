"""The peak of a plan of ``bytescale memory-plan`` in training (MEMO section 4.2): reserved, not its addresses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.activations import ActivationConfig
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory, StepRecord
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.build import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the memory plan."""
    group = parser.add_argument_group("bytescale: memory plan")
    group.add_argument(
        "--memory-plan",
        type=Path,
        metavar="FILE",
        help="Reserve the peak of a plan of `bytescale memory-plan --output FILE` at once, on a GPU; its addresses are "
        "not enforced. Swapped layers are read back into two buffers of the planned size. The plan must be of this "
        "model and step, on one process.",
    )


def resolve(args: Any, run: RunConfig) -> StepMemory:
    """Return the plan. Raises ValueError where it cannot be read, is not a plan, or is for another model or step."""
    activations = run.get(ActivationConfig)
    chooses_shares = activations.policy != "none" and (activations.swap, activations.recompute) == (None, None)
    if chooses_shares and run.find(HdpConfig) is not None:
        raise ValueError("--memory-plan needs one share for all micro-batches: give --swap-fraction, or remove it")
    path: Path = args.memory_plan
    try:
        memory = StepMemory.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--memory-plan {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--memory-plan {path}: {error}") from None
    load = activations.largest
    dtype = str(args.params_dtype).removeprefix("torch.")
    device = "cuda" if run.process.on_cuda else "cpu"
    shares, loss_tokens = activations.plan(load), activations.layers.loss_tokens
    step = StepRecord(run.shape, load.num_tokens, dtype, loss_tokens, shares, traits_of(args), device)
    memory.check_serves(step, path)
    return memory


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
    from megatron.bytescale.training.activation_memory import PlannedMemory

    return PlannedMemory.of(runtime).around(training)


_NOT_RECORDED = "remove it: `bytescale memory-plan` cannot record such a step"
REFUSALS = (
    refuse("--transformer-impl transformer_engine", "memory_plan", "use local: its layers cannot be recorded yet",
           lambda args: args.transformer_impl == "transformer_engine"),
    *(refuse(flag, "memory_plan", _NOT_RECORDED) for flag in (
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
