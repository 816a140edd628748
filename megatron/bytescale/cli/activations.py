"""``bytescale activations``: what each policy keeps, swaps and recomputes, and what that costs. Nothing is trained."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bytescale_ext.cost_file import check_same_model, read_cost, shipped
from bytescale_ext.plan.activation import ActivationPlan, LayerLoad, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation_forecast import Forecast, forecast
from bytescale_ext.plan.activation_policy import POLICIES, make_plan
from bytescale_ext.plan.cost import ModelCost, ModelShape
from bytescale_ext.plan.model_states import state_bytes

NAME = "activations"
HELP = "predict what activation policies cost in time and memory, for lengths from 8K to 1M"
EXAMPLE = "bytescale activations --seq-length 131072 --policy priced"

LENGTHS = tuple(8192 << power for power in range(8))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale activations``."""
    parser.add_argument(
        "--model-flags",
        metavar="'FLAGS'",
        help="Megatron's flags of the model in one quoted string; others in it are passed over, and with --num-experts "
        "all layers have experts (default: the model of the cost file)",
    )
    parser.add_argument(
        "--cost",
        type=Path,
        metavar="F.json",
        help="measured costs (bytescale profile; default: shipped ones, or rates)",
    )
    parser.add_argument("--seq-length", type=int, default=131072, metavar="S", help="tokens of the table per tensor")
    parser.add_argument("--ring-width", type=int, default=1, metavar="D", help="ranks that share the sequence (1)")
    parser.add_argument("--policy", default="auto", metavar="P", help=f"one of {', '.join(POLICIES)} (default: auto)")
    parser.add_argument("--device-memory-gb", type=float, default=100.0, metavar="G", help="for activations (100)")
    parser.add_argument("--host-memory-gb", type=float, default=100.0, metavar="G", help="of each process (100)")
    parser.add_argument(
        "--optimizer-ranks",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the optimizer's states, as --use-distributed-optimizer does (1)",
    )
    parser.add_argument("--link-gb-per-second", type=float, default=55.0, metavar="B", help="to host, one way (55)")
    parser.add_argument(
        "--tflops",
        type=float,
        nargs=3,
        default=(650.0, 600.0, 500.0),
        metavar=("GEMM", "ATTENTION", "BACKWARD"),
        help="rates of matrix products, attention forward and attention backward, where no cost file is of this model",
    )
    parser.add_argument(
        "--chunked-cross-entropy", type=int, metavar="TOKENS", help="as in training: logits of TOKENS tokens at a time"
    )
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw time and memory against length, all policies")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Predict and print.

    Raises:
        ValueError: sizes that are no sizes, an unknown policy, a bad cost file, or nothing that fits.
    """
    check_sizes(args)
    cost = costs(args)
    machine = Machine(args.device_memory_gb * 1e9, args.host_memory_gb * 1e9, args.link_gb_per_second * 1e9)
    load = load_of(args, cost, args.seq_length)
    plan = make_plan(args.policy, load, machine)
    rows = [(length, policy, predict(policy, load_of(args, cost, length), machine))
            for length in LENGTHS for policy in (POLICIES if args.plot else (args.policy,))]  # fmt: skip
    if args.plot:
        from bytescale_ext.pictures_activations import draw_policies

        draw_policies([(length, policy, found[1] if found else None) for length, policy, found in rows], args.plot)
    shown = [(length, found) for length, policy, found in rows if policy == args.policy]
    if args.json:
        states = states_of(args, cost)
        print(json.dumps({**as_json(args.seq_length, plan, load, machine, shown), "state_bytes": states}))
        return 0
    print(tensor_table(plan, load, machine))
    print(f"\n{plan_text(plan)}\n")
    states = states_of(args, cost)
    print(length_table(shown, lambda length: load_of(args, cost, length), states))
    print(f"\npeak: device, with {states / 1e9:.2f} GB of parameters, gradients and optimizer states")
    if cost.shape.num_expert_layers:
        print("experts are left alone: what they save and their parameters stay on the device and are not counted here")
    return 0


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that is not a positive number."""
    for name in ("seq_length", "ring_width", "optimizer_ranks", "link_gb_per_second", "chunked_cross_entropy"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    for name in ("device_memory_gb", "host_memory_gb"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be a number from 0 on, got {getattr(args, name)}")
    if not all(0 < rate < math.inf for rate in args.tflops):
        raise ValueError(f"--tflops must be positive, got {' '.join(map(str, args.tflops))}")


def costs(args: argparse.Namespace) -> ModelCost:
    """Costs of the model: those of the file, or of given rates. Raises ValueError."""
    if args.model_flags is None:
        return shipped("bytescale_7b") if args.cost is None else read_cost(args.cost)
    shape = shape_of_flags(args.model_flags)
    if args.cost is None:
        return cost_of_rates(shape, *(1e12 * rate for rate in args.tflops))
    cost = read_cost(args.cost)
    return check_same_model(cost, shape, cost.tensor_parallel, cost.dtype, args.cost)


def shape_of_flags(flags: str) -> ModelShape:
    """The sizes in a string of Megatron's flags, with Megatron's defaults. Raises ValueError for a missing one."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    for name in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
                 "kv-channels", "vocab-size", "num-experts", "moe-router-topk", "moe-ffn-hidden-size"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--swiglu", action="store_true")
    try:
        found, _ = parser.parse_known_args(shlex.split(flags))
    except argparse.ArgumentError as error:
        raise ValueError(f"--model-flags: {error}") from None
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if (getattr(found, name) or 0) < 1:
            raise ValueError(f"--model-flags needs a positive --{name.replace('_', '-')}")
    ffn = found.ffn_hidden_size or (64 * (found.hidden_size * 8 // 3 // 64) if found.swiglu else 4 * found.hidden_size)
    heads = found.num_attention_heads
    experts = {}
    if found.num_experts:
        width = (found.moe_router_topk or 2) * (found.moe_ffn_hidden_size or ffn)
        experts = {"num_expert_layers": found.num_layers, "expert_ffn_hidden": width, "num_experts": found.num_experts}
    return ModelShape(
        num_layers=found.num_layers,
        hidden=found.hidden_size,
        num_heads=heads,
        num_kv_heads=found.num_query_groups or heads,
        head_dim=found.kv_channels or found.hidden_size // heads,
        ffn_hidden=ffn,
        gated=found.swiglu,
        vocab=found.vocab_size or 32000,
        **experts,
    )


def load_of(args: argparse.Namespace, cost: ModelCost, length: int) -> LayerLoad:
    """A sequence of ``length`` tokens on the ranks of its ring."""
    return layer_load(cost, length, args.ring_width, loss_tokens=args.chunked_cross_entropy)


def states_of(args: argparse.Namespace, cost: ModelCost) -> float:
    """Bytes of parameters, gradients and optimizer states of one process."""
    element_bytes = 4 if cost.dtype == "float32" else 2
    return state_bytes(cost.shape, element_bytes, cost.tensor_parallel, args.optimizer_ranks)


def predict(policy: str, load: LayerLoad, machine: Machine) -> tuple[ActivationPlan, Forecast] | None:
    """The plan of a policy and its forecast, or None where it does not fit."""
    try:
        plan = make_plan(policy, load, machine)
    except ValueError:
        return None
    prediction = forecast(plan, load, machine)
    return (plan, prediction) if prediction.fits(machine) else None


def tensor_table(plan: ActivationPlan, load: LayerLoad, machine: Machine) -> str:
    """A row for each tensor of a layer."""
    lines = [f"{'tensor of a layer':26} {'KiB/token':>9} {'ns to rebuild a KiB':>20}  choice"]
    for tensor in load.tensors:
        price = load.price(tensor, machine)
        price_text = "never" if math.isinf(price) else f"{price * 1024e9:.1f}"
        shares = zip(("swap", "keep", "recompute"), plan.shares(tensor), strict=True)
        choice = ", ".join(f"{name} {share:.0%}" for name, share in shares if share > 0.0005)
        lines.append(f"{tensor.name:26} {tensor.bytes_per_token / 1024:9.2f} {price_text:>20}  {choice}")
    return "\n".join(lines)


def plan_text(plan: ActivationPlan) -> str:
    """The shares of a plan in one line."""
    return (
        f"policy {plan.policy}: alpha {plan.swap:.3f} (swapped), kept {plan.keep:.3f}, recomputed "
        f"{plan.recompute:.3f}; "
        f"layer input and attention output swapped {plan.input_swap:.3f}; layers kept whole {plan.resident_layers}"
    )


def length_table(
    rows: list[tuple[int, tuple[ActivationPlan, Forecast] | None]],
    load_at: Callable[[int], LayerLoad],
    states: float,
) -> str:
    """A row for each length: the plan's shares, times in milliseconds, memory in GB; ``states`` are in the peak."""
    lines = [f"{'tokens':>8} {'policy':>8} {'alpha':>6} {'kept':>6} {'layer ms':>9} {'transfer ms':>11} "
             f"{'step ms':>10} {'device GB':>9} {'peak GB':>8} {'host GB':>8}"]  # fmt: skip
    for length, found in rows:
        if found is None:
            lines.append(f"{length:8} does not fit")
            continue
        plan, predicted = found
        load = load_at(length)
        milliseconds = [1e3 * x for x in (load.forward_seconds, predicted.transfer_seconds, predicted.step_seconds)]
        lines.append(
            f"{length:8} {plan.policy:>8} {plan.swap:6.3f} {plan.keep:6.3f} {milliseconds[0]:9.2f} "
            f"{milliseconds[1]:11.2f} {milliseconds[2]:10.1f} {predicted.device_bytes / 1e9:9.2f} "
            f"{(predicted.device_bytes + states) / 1e9:8.2f} {predicted.host_bytes / 1e9:8.2f}"
        )
    return "\n".join(lines)


def as_json(
    length: int,
    plan: ActivationPlan,
    load: LayerLoad,
    machine: Machine,
    rows: list[tuple[int, tuple[ActivationPlan, Forecast] | None]],
) -> dict[str, Any]:
    """Both tables as plain lists and dicts."""
    tensors = [
        {"name": tensor.name, "bytes_per_token": tensor.bytes_per_token,
         "seconds_per_byte": None if tensor.kind == "input" else load.price(tensor, machine),
         **dict(zip(("swap", "keep", "recompute"), plan.shares(tensor), strict=True))}
        for tensor in load.tensors
    ]  # fmt: skip
    lengths = [
        {"num_tokens": tokens, "plan": asdict(found[0]), "forecast": asdict(found[1])} if found else
        {"num_tokens": tokens, "plan": None, "forecast": None}
        for tokens, found in rows
    ]  # fmt: skip
    return {"seq_length": length, "plan": asdict(plan), "tensors": tensors, "lengths": lengths}
