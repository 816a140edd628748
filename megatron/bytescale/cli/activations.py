"""``bytescale activations``: predict kept, swapped and recomputed tensors, time and memory of activation policies."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace

from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.measure.devices import device_cost
from bytescale_ext.plan.activation.forecast import ActivationForecast, forecast
from bytescale_ext.plan.activation.load import LayerLoad, Machine, cost_of_rates
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import POLICIES, make_plan
from bytescale_ext.plan.setup.layers import stage_load
from bytescale_ext.plan.setup.memory import stage_state_bytes
from bytescale_ext.plan.setup.policy import stage_machine
from bytescale_ext.plan.setup.setup import Budget, Setup, setup_of_cost
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale.cli.shared.inputs import check_picture, count
from megatron.bytescale.cli.shared.model_flags import setup_of_model
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot, add_rates, check_rates

NAME = "activations"
HELP = "predict time and memory of activation policies, for lengths from 8K to 1M"
EXAMPLE = "bytescale activations --seq-length 131072 --activation-policy priced"

LENGTHS = tuple(8192 << power for power in range(8))
DEFAULT_GB = 100.0
"""Device memory for activations if ``--device-memory-gb`` is not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale activations``."""
    add_option(parser, "--model-flags", note="default: the model of the cost file")
    add_option(parser, "--cost-file", note="default: a 7B model on an H100, or the model of --model-flags")
    add_rates(parser)
    add_option(parser, "--seq-length", default=131072, note="for the table of tensors")
    parser.add_argument("--ring-width", type=count, default=1, metavar="D", help="ranks that share the sequence (1)")
    add_option(parser, "--activation-policy", default="auto")
    add_option(parser, "--device-memory-gb", note=f"default: {DEFAULT_GB:g} GB in addition to the model states")
    add_option(parser, "--host-memory-gb", default=100.0)
    add_option(parser, "--optimizer-ranks")
    add_option(parser, "--link-gb-per-second")
    add_option(parser, "--chunked-cross-entropy")
    add_plot(parser, "time and memory of all policies against length")
    add_json(parser)


@dataclass(frozen=True)
class PolicyAtLength:
    """One policy at one length, without plan and forecast if it does not fit."""

    load: LayerLoad
    num_tokens: int
    policy: str
    plan: ActivationPlan | None = None
    forecast: ActivationForecast | None = None


def run(args: argparse.Namespace) -> int:
    """Predict the policies and print them.

    Raises:
        ValueError: sizes out of range, an unknown policy, a bad cost file, or a policy that does not fit.
    """
    check_sizes(args)
    setup = setup_of_options(args)
    machine, load = stage_machine(setup, 0), load_of(args, setup, args.seq_length)
    plan, states = make_plan(args.activation_policy, load, machine), machine.state_bytes
    rows = [forecast_policy(policy, load_of(args, setup, length), length, machine)
            for length in LENGTHS for policy in (POLICIES if args.plot else (args.activation_policy,))]  # fmt: skip
    if args.plot:
        from bytescale_ext.draw.activations import draw_policies

        draw_policies([(row.num_tokens, row.policy, row.forecast) for row in rows], args.plot)
    rows = [row for row in rows if row.policy == args.activation_policy]
    if args.json:
        tensors = {"seq_length": args.seq_length, "plan": asdict(plan), "tensors": tensors_json(plan, load, machine)}
        print(json.dumps({**tensors, "lengths": [length_json(row) for row in rows], "state_bytes": states}))
        return 0
    print(tensor_table(plan, load, machine))
    print(f"\n{shares_text(plan)}\n")
    print(length_table(rows, states))
    print(f"\npeak: device memory with {states / 1e9:.2f} GB of parameters, gradients and optimizer states")
    if setup.shape.num_expert_layers:
        print("experts are not planned: their saved tensors stay on the device")
    return 0


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError for a rate or a size out of range, or a picture that cannot be written."""
    check_picture("--plot", args.plot)
    if not 0 < args.link_gb_per_second < math.inf:
        raise ValueError(f"--link-gb-per-second must be positive and finite, got {args.link_gb_per_second}")
    for flag, value in (("--device-memory-gb", args.device_memory_gb), ("--host-memory-gb", args.host_memory_gb)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag} must be at least 0, got {value}")
    check_rates(args.tflops)


def setup_of_options(args: argparse.Namespace) -> Setup:
    """Return the setup of the options. Raises ValueError if the cost file is for another model."""
    if args.model_flags is None:
        setup = setup_of_cost(device_cost() if args.cost_file is None else read_cost(args.cost_file))
    else:
        setup = setup_of_model(args.model_flags, ["--bf16"], 1)
        cost = setup.cost
        if args.tflops is not None:
            cost = cost_of_rates(setup.shape, *(1e12 * rate for rate in args.tflops))
        if args.cost_file is not None:
            cost = read_cost(args.cost_file)
            cost = check_same_model(cost, setup.shape, cost.tensor_parallel, cost.dtype, args.cost_file)
        mesh = replace(setup.mesh, tensor_parallel=cost.tensor_parallel, shares_optimizer=True)
        numerics = replace(setup.numerics, element_bytes=cost.element_bytes)
        setup = replace(setup, cost=cost, measured=args.cost_file is not None, mesh=mesh, numerics=numerics)
    setup = replace(
        setup,
        cluster=replace(setup.cluster, num_ranks=args.optimizer_ranks),
        numerics=replace(setup.numerics, loss_tokens=args.chunked_cross_entropy),
    )
    device_gb = args.device_memory_gb
    device_bytes = stage_state_bytes(setup)[0] + DEFAULT_GB * 1e9 if device_gb is None else device_gb * 1e9
    link = args.link_gb_per_second * 1e9
    return replace(setup, budget=Budget(device_bytes, args.host_memory_gb * 1e9, link_bytes_per_second=link))


def load_of(args: argparse.Namespace, setup: Setup, length: int) -> LayerLoad:
    """Return the load of each rank of a ring that shares a sequence of ``length`` tokens."""
    cluster = replace(setup.cluster, tokens_per_rank=-(-length // args.ring_width))
    return stage_load(replace(setup, cluster=cluster, sequences=replace(setup.sequences, longest=length)), 0, ONE_SLICE)


def forecast_policy(policy: str, load: LayerLoad, num_tokens: int, machine: Machine) -> PolicyAtLength:
    """Plan a policy for a sequence of ``num_tokens`` tokens and forecast its time and memory."""
    try:
        plan = make_plan(policy, load, machine)
    except ValueError:
        return PolicyAtLength(load, num_tokens, policy)
    predicted = forecast(plan, load, machine)
    if not predicted.fits(machine):
        return PolicyAtLength(load, num_tokens, policy)
    return PolicyAtLength(load, num_tokens, policy, plan, predicted)


def tensor_table(plan: ActivationPlan, load: LayerLoad, machine: Machine) -> str:
    """Return a table with a row for each tensor of a layer."""
    lines = [f"{'tensor of a layer':26} {'KiB/token':>9} {'ns to rebuild a KiB':>20}  choice"]
    for tensor in load.tensors:
        price = load.price(tensor, machine)
        price_text = "never" if math.isinf(price) else f"{price * 1024e9:.1f}"
        shares = zip(("swap", "keep", "recompute"), plan.shares(tensor), strict=True)
        choice = ", ".join(f"{name} {share:.0%}" for name, share in shares if share > 0.0005)
        lines.append(f"{tensor.name:26} {tensor.bytes_per_token / 1024:9.2f} {price_text:>20}  {choice}")
    return "\n".join(lines)


def shares_text(plan: ActivationPlan) -> str:
    """Return the shares of a plan in one line."""
    return (
        f"policy {plan.policy}: alpha {plan.swap:.3f} (swapped), kept {plan.keep:.3f}, recomputed "
        f"{plan.recompute:.3f}; "
        f"layer input and attention output swapped {plan.input_swap:.3f}; layers kept whole {plan.resident_layers}"
    )


def length_table(rows: list[PolicyAtLength], states: float) -> str:
    """Return a table with a row for each length: shares, milliseconds and GB; peaks include ``states``, in bytes."""
    lines = [f"{'tokens':>8} {'policy':>8} {'alpha':>6} {'kept':>6} {'layer ms':>9} {'transfer ms':>11} "
             f"{'step ms':>10} {'device GB':>9} {'peak GB':>8} {'host GB':>8}"]  # fmt: skip
    for row in rows:
        plan, predicted = row.plan, row.forecast
        if plan is None or predicted is None:
            lines.append(f"{row.num_tokens:8} does not fit")
            continue
        lines.append(
            f"{row.num_tokens:8} {plan.policy:>8} {plan.swap:6.3f} {plan.keep:6.3f} "
            f"{1e3 * row.load.forward_seconds:9.2f} {1e3 * predicted.transfer_seconds:11.2f} "
            f"{1e3 * predicted.step_seconds:10.1f} {predicted.device_bytes / 1e9:9.2f} "
            f"{(predicted.device_bytes + states) / 1e9:8.2f} {predicted.host_bytes / 1e9:8.2f}"
        )
    return "\n".join(lines)


def tensors_json(plan: ActivationPlan, load: LayerLoad, machine: Machine) -> list[dict[str, object]]:
    """Return the rows of ``tensor_table`` as dicts."""
    return [
        {"name": tensor.name, "bytes_per_token": tensor.bytes_per_token,
         "seconds_per_byte": None if tensor.kind == "input" else load.price(tensor, machine),
         **dict(zip(("swap", "keep", "recompute"), plan.shares(tensor), strict=True))}
        for tensor in load.tensors
    ]  # fmt: skip


def length_json(row: PolicyAtLength) -> dict[str, object]:
    """Return a row of ``length_table`` as dicts."""
    plan, predicted = row.plan and asdict(row.plan), row.forecast and asdict(row.forecast)
    return {"num_tokens": row.num_tokens, "plan": plan, "forecast": predicted}
