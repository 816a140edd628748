"""``bytescale memory-plan``: record the allocations of one training step and plan the address of each tensor."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.new_file import write_text
from bytescale_ext.plan.activation.load import RESIDENT_LAYERS
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import given_plan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.check import check_covers, check_two_level_plan
from bytescale_ext.plan.memory.exact import improve
from bytescale_ext.plan.memory.passes import plan_step
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import MemoryPlan, Request
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory, StepMemoryJson, StepRecord
from megatron.bytescale.cli.shared.inputs import check_writable
from megatron.bytescale.cli.shared.model_flags import shape_of_flags
from megatron.bytescale.cli.shared.options import add_cpu, add_json, add_option

if TYPE_CHECKING:
    from bytescale_ext.activation.trace import AllocationTrace

NAME = "memory-plan"
HELP = "record the allocations of one training step and plan their addresses"
EXAMPLE = "bytescale memory-plan --seq-length 2048 --output runs/plan.json"

DEFAULT_FLAGS = (
    "--num-layers 3 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 704 --swiglu --vocab-size 1024 "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale memory-plan``."""
    note = "sizes, norms, biases, positions and tied embeddings; the step runs here (default: a small model)"
    add_option(parser, "--model-flags", note=note)
    parser.set_defaults(model_flags=DEFAULT_FLAGS)
    add_option(parser, "--seq-length", default=512)
    add_option(parser, "--chunked-cross-entropy")
    parser.add_argument(
        "--activation-policy",
        default="none",
        choices=("none", "memo", "priced", "offload"),
        help="activation policy of the training (default: none)",
    )
    parser.add_argument(
        "--swap-fraction", type=float, metavar="F", help="share of tensors that are swapped; needed with a policy"
    )
    parser.add_argument(
        "--recompute-fraction", type=float, metavar="F", help="share of tensors that are computed again"
    )
    add_option(parser, "--host-memory-gb", default=0.0)
    parser.add_argument(
        "--solver-seconds", type=float, default=10.0, metavar="T", help="limit of each proof, in seconds (10)"
    )
    add_cpu(parser)
    parser.add_argument("--output", type=Path, metavar="F.json", help="write the plan to this file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Record a step, plan its memory and print the plans.

    Raises:
        ValueError: sizes out of range, or a file that cannot be written.
    """
    if args.output is not None:
        check_writable("--output", args.output)
    shape = shape_of_flags(args.model_flags)
    if shape.num_experts:
        raise ValueError("--model-flags has --num-experts: memory plans are for dense models; remove it")
    if shape.num_layers < 2:
        raise ValueError("--model-flags needs at least 2 layers: one plan serves the passes of all layers")
    if not 0 < args.solver_seconds < math.inf:
        raise ValueError(f"--solver-seconds must be positive and finite, got {args.solver_seconds}")
    activations = activations_of(args)
    traits = traits_of_flags(args.model_flags, args.seq_length)
    trace, record, buffer_bytes = record_step(args, shape, traits, activations)
    timed: list[tuple[MemoryPlan, float]] = []

    def place(requests: Sequence[Request]) -> MemoryPlan:
        begun = time.perf_counter()
        timed.append((improve(plan_memory(requests), args.solver_seconds), time.perf_counter() - begun))
        return timed[-1][0]

    requests = trace.requests()
    planned = plan_step(requests, trace.passes, place)
    names = [f"layer, {name}" for name in planned.two.levels]
    plans = dict(zip([*names, "model, two levels", "model, one level"], timed, strict=True))
    print(json.dumps(figures(plans)) if args.json else table_text(plans))
    if args.output is not None:
        check_two_level_plan(planned.two)
        check_covers(planned.two, requests)
        write(args.output, StepMemory(record, buffer_bytes, planned.two).to_json())
    return 0


def activations_of(args: argparse.Namespace) -> ActivationPlan:
    """Return the plan of activations. Raises ValueError for missing shares or missing host memory."""
    swap, recompute, policy = args.swap_fraction, args.recompute_fraction, args.activation_policy
    if not 0 <= args.host_memory_gb < math.inf:
        raise ValueError(f"--host-memory-gb {args.host_memory_gb:g} is not an amount of memory; give 0 or more")
    if (swap or policy in ("memo", "priced")) and not args.host_memory_gb:
        raise ValueError("give --host-memory-gb, as in training: swapped tensors go there")
    if (swap, recompute) == (None, None):
        if policy != "none":
            raise ValueError(f"--activation-policy {policy} needs --swap-fraction here; a training prints its fraction")
        return ActivationPlan("none")
    return given_plan(policy, swap, recompute, RESIDENT_LAYERS)


def traits_of_flags(flags: str, length: int) -> ModelTraits:
    """Read the traits of a model that decide the tensors of a step, in addition to sizes, from Megatron's flags.

    Missing flags have Megatron's defaults. Learned positions are at least ``length``. Raises ValueError for a value
    that cannot be recorded.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--normalization", default="LayerNorm", choices=("LayerNorm", "RMSNorm"))
    positions = ("learned_absolute", "rope", "none")
    parser.add_argument("--position-embedding-type", default="learned_absolute", choices=positions)
    parser.add_argument("--max-position-embeddings", type=int, default=length)
    for name in ("swiglu", "disable-bias-linear", "add-qkv-bias", "qk-layernorm", "no-bias-swiglu-fusion",
                 "no-bias-gelu-fusion", "untie-embeddings-and-output-weights"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    try:
        traits, _ = parser.parse_known_args(shlex.split(flags))
    except argparse.ArgumentError as error:
        raise ValueError(f"--model-flags: {error}") from None
    is_learned = traits.position_embedding_type == "learned_absolute"
    return ModelTraits(
        normalization=traits.normalization,
        linear_biases=not traits.disable_bias_linear,
        qkv_biases=traits.add_qkv_bias or not traits.disable_bias_linear,
        qk_norms=traits.qk_layernorm,
        positions=traits.position_embedding_type,
        learned_positions=max(length, traits.max_position_embeddings) if is_learned else 0,
        tied_embeddings=not traits.untie_embeddings_and_output_weights,
        fused_activation=not (traits.no_bias_swiglu_fusion if traits.swiglu else traits.no_bias_gelu_fusion),
    )


def record_step(
    args: argparse.Namespace, shape: ModelShape, traits: ModelTraits, activations: ActivationPlan
) -> tuple[AllocationTrace, StepRecord, int]:
    """Run a forward and a backward pass; return allocations, settings, and the bytes of the rounding buffer."""
    import torch

    from bytescale_ext.activation.trace import AllocationTrace, watch_passes
    from megatron.bytescale.training.one_device import build_model

    on_cuda = torch.cuda.is_available() and not args.cpu
    length, loss_tokens = args.seq_length, args.chunked_cross_entropy
    dtype = torch.bfloat16 if on_cuda else torch.float32
    traits = replace(traits, fused_activation=traits.fused_activation and on_cuda)
    built = build_model(
        shape, dtype, int(args.host_memory_gb * 1e9), loss_tokens, on_cpu=args.cpu or None, traits=traits
    )
    built.store.plan = activations
    built.weights.clear()
    for parameter in built.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients are model states, not activations
    tokens = built.batch(length, seed=0)
    states = [tensor for p in built.model.parameters() for tensor in (p.detach(), p.grad) if tensor is not None]
    trace = AllocationTrace([*states, tokens, built.store.link.arena.memory])
    for number, layer in enumerate(built.model.decoder.layers):
        watch_passes(layer, number, lambda: trace)
    with trace:
        built.loss(tokens).backward()
    name = str(dtype).removeprefix("torch.")
    record = StepRecord(shape, length, name, loss_tokens, activations, traits, "cuda" if on_cuda else "cpu")
    return trace, record, built.store.counts.restored_bytes


def figures(plans: dict[str, tuple[MemoryPlan, float]]) -> dict[str, dict[str, float]]:
    """Return the figures of each plan by its name."""
    return {
        name: {"num_requests": len(plan.requests), "bound_bytes": plan.bound, "peak_bytes": plan.peak,
               "is_optimal": plan.is_optimal, "seconds": seconds}
        for name, (plan, seconds) in plans.items()
    }  # fmt: skip


def table_text(plans: dict[str, tuple[MemoryPlan, float]]) -> str:
    """Return a table with a row for each plan."""
    lines = [f"{'trace':18} {'requests':>8} {'bound MB':>10} {'peak MB':>10} {'peak/bound':>10}  {'proof':10} {'s':>6}"]
    for name, (plan, seconds) in plans.items():
        ratio = plan.peak / plan.bound if plan.bound else 1.0
        proof = "optimal" if plan.is_optimal else "none"
        lines.append(
            f"{name:18} {len(plan.requests):8} {plan.bound / 1e6:10.3f} {plan.peak / 1e6:10.3f} {ratio:10.4f}  "
            f"{proof:10} {seconds:6.2f}"
        )
    return "\n".join(lines)


def write(path: Path, value: StepMemoryJson) -> None:
    """Write a plan file. Raises ValueError if it cannot be written."""
    try:
        write_text(path, json.dumps(value) + "\n")
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written ({error.strerror})") from error
