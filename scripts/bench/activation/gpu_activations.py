"""Measure step time, memory and MFU of activation policies and of the methods of Megatron and torch, on one GPU.

    .venv/bin/python scripts/bench/activation/gpu_activations.py [--host-bound] [--cost-file cost.json] [--json]

The model has 8 layers of 7B width; a step is one sequence, forward and backward without optimizer. All arms have the
same attention kernel and chunked loss, and only arms that keep the same number of layers whole are compared. Step time
is the median of 3 steps. Recomputed work does not count in MFU. One further step measures stalls, the time that
computation waits for copies. Arms that run out of memory are reported, and all figures are compared with the targets.
By default the main arms run at 32K and 128K tokens; with ``--host-bound`` a 3B model runs at 64K tokens with 32 GB of
host memory. Each takes less than 9 minutes, as predicted from the FLOPs.

``--all`` runs every arm at 8K to 192K tokens (``--host-bound``: 32K to 256K, with 16 to 100 GB) and takes hours. It
adds a sweep of alpha, a search for the longest trainable sequence, and, if TransformerEngine is installed, Megatron's
fine-grained offload in a separate process. ``--device cpu --quick`` runs tiny sizes and counts memory against a small
limit.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.activation.arena import HostArena
from bytescale_ext.activation.link import make_link
from bytescale_ext.activation.trace import AllocationTrace
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import Machine
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_cost import model_flops
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.step_file import ModelTraits
from megatron.bytescale.training.one_device import OneDeviceModel, build_model
from scripts.bench.activation.activation_arms import (
    ENGINE_METHOD,
    LAYER_REPEATS,
    MAIN_ARMS,
    STALL_STEPS,
    WARM_UP,
    Arm,
    Settings,
    arms_of,
    lacks_host_memory,
    load_of,
    wanted,
    with_method,
)
from scripts.bench.activation.activation_verdicts import longest, verdicts
from scripts.bench.activation.gpu_activations_calibrate import layer_seconds
from scripts.bench.activation.models import LOSS_TOKENS, SHAPE, TINY
from scripts.bench.gpu import gpu_parser, parse_on_gpu, repeated_seconds
from scripts.bench.progress import progress

LENGTHS = (32768, 131072)
ALL_LENGTHS = (8192, 16384, 32768, 65536, 98304, 131072, 196608)
HOST_BOUND_SHAPE = ModelShape(28, 3072, 24, 8, 128, 8192, True, 128256)
HOST_BOUND_LENGTHS, ALL_HOST_BOUND_LENGTHS = (65536,), (32768, 65536, 131072, 262144)
HOST_BOUND_GB, ALL_HOST_BOUND_GB = (32.0,), (16.0, 32.0, 64.0, 100.0)
TINY_LENGTHS = (64, 130)
LONGEST_ARMS = ("none", "full recompute", "full recompute, inputs on host", "keep attention output", "priced")
MOST_TOKENS, GRANULE = 393216, 1024
TINY_MOST_TOKENS, TINY_GRANULE, TINY_BYTES = 512, 32, 2_000_000
ENGINE_ARM = "fine-grained offload (TransformerEngine)"
ENGINE_SETTING = {"NVTE_CPU_OFFLOAD_V1": "1"}
"""Megatron requires this variable since TransformerEngine 2.10; without it weights are offloaded too."""
USABLE = 0.92
"""Share of device memory that plans use; the driver, workspaces and gaps between blocks need the rest."""


def one_step(built: OneDeviceModel, arm: Arm, tokens: torch.Tensor) -> float:
    """Run forward and backward on ``tokens`` [s]; return the loss."""
    with with_method(built, arm):
        loss = built.loss(tokens)
        loss.backward()
    value = float(loss.detach())  # waits for the forward pass
    if built.device.type == "cuda":
        torch.cuda.synchronize()
    built.model.zero_grad(set_to_none=False)
    return value


def stall_seconds(built: OneDeviceModel, arm: Arm, tokens: torch.Tensor) -> float | None:
    """Return the seconds that a step on ``tokens`` [s] waits for copies; None if torch does the copies."""
    if arm.method in ("save_on_cpu", ENGINE_METHOD):
        return None
    link = built.store.link
    link.timed = True
    for _ in range(STALL_STEPS):
        one_step(built, arm, tokens)
    return link.take_stall_seconds() / STALL_STEPS


def clean(built: OneDeviceModel, on_cuda: bool) -> None:
    """Remove all state of the previous arm, even if it failed in mid-step."""
    built.model.zero_grad(set_to_none=False)
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    built.store.take_counts()


def measure(built: OneDeviceModel, arm: Arm, length: int, settings: Settings) -> dict[str, Any]:
    """Return the figures of one arm at one length, or {"error": why it did not run}."""
    built.store.plan = arm.plan
    clean(built, settings.on_cuda)
    lack = lacks_host_memory(arm, length, settings)
    if lack is not None:
        return {"error": lack}
    tokens = built.batch(length, seed=0)
    losses: list[float] = []
    try:
        seconds = repeated_seconds(
            lambda: losses.append(one_step(built, arm, tokens)), settings.num_steps, settings.on_cuda, WARM_UP
        )
        counts = built.store.take_counts()
        stalls = stall_seconds(built, arm, tokens)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    step = statistics.median(seconds)
    machine = Machine(settings.device_gb * 1e9, settings.host_gb[0] * 1e9, settings.link_gb_per_second * 1e9)
    predicted = forecast(arm.plan, load_of(settings, length), machine) if not arm.method else None
    return {
        "step_seconds": step,
        "stall_seconds": stalls,
        "loss": losses[-1],
        "mfu": model_flops(settings.shape, [length]) / step / settings.peak_flops,
        "peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if settings.on_cuda else 0.0,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if settings.on_cuda else 0.0,
        "host_gb": built.store.link.arena.peak_bytes / 1e9,
        "swapped_bytes": counts.swapped_bytes // len(losses),
        "overflowed_bytes": counts.overflowed_bytes // len(losses),
        "recomputed_flops": counts.recomputed_flops // len(losses),
        "alpha": arm.plan.swap,
        "whole_layers": arm.whole_layers(settings.shape.num_layers),
        "predicted_peak_gb": settings.states_gb + predicted.device_bytes / 1e9 if predicted else None,
        "predicted_layers_seconds": predicted.step_seconds if predicted else None,
    }


def step_fits(built: OneDeviceModel, arm: Arm, length: int, settings: Settings) -> bool:
    """Return whether a step on ``length`` tokens fits in memory; on CPU the limit is ``TINY_BYTES``."""
    built.store.plan = arm.plan
    clean(built, settings.on_cuda)
    tokens = built.batch(length, seed=0)
    if not settings.on_cuda:
        with AllocationTrace([*built.model.parameters(), built.store.link.arena.memory]) as trace:
            one_step(built, arm, tokens)
        return liveness_bound(trace.requests()) <= TINY_BYTES
    try:
        one_step(built, arm, tokens)
    except torch.OutOfMemoryError:
        return False
    return True


def longest_tokens(built: OneDeviceModel, settings: Settings) -> dict[str, int]:
    """Return the longest trainable sequence of each of ``LONGEST_ARMS``, with the first host budget."""
    host_gb, memory = settings.host_gb[0], built.store.link.arena.memory
    budget = replace(settings, with_sweep=False)
    budget = replace(budget, device_gb=TINY_BYTES / 1e9) if settings.is_tiny else budget

    def fits(name: str, length: int) -> bool:
        arm = next((arm for arm in arms_of(budget, length, host_gb, kept_whole=0) if arm.name == name), None)
        built.store.link = make_link(HostArena(memory[: int(host_gb * 1e9)]), settings.on_cuda)
        return arm is not None and step_fits(built, arm, length, settings)

    most, granule = (TINY_MOST_TOKENS, TINY_GRANULE) if settings.is_tiny else (MOST_TOKENS, GRANULE)
    tokens = {}
    for name in progress([name for name in LONGEST_ARMS if not settings.arms or name in settings.arms]):
        tokens[name] = longest(lambda length, name=name: fits(name, length), settings.lengths[0], most, granule)
        print(f"longest sequence of {name:32} {tokens[name]:8} tokens{' or more' * (tokens[name] == most)}", flush=True)
    return tokens


def run(settings: Settings) -> dict[str, Any]:
    """Return a row for every host budget, length and arm, and the targets. Host budgets are views of one arena."""
    rows = engine_rows(settings) if settings.on_cuda and not settings.engine and not settings.arms else []
    dtype = torch.bfloat16 if settings.on_cuda else torch.float32
    most = 0 if settings.engine else int(max(settings.host_gb) * 1e9)  # the engine pins its own memory
    traits = ModelTraits(fused_activation=True, transformer_impl="transformer_engine") if settings.engine else None
    built = build_model(settings.shape, dtype, most, LOSS_TOKENS, on_cpu=not settings.on_cuda, traits=traits)
    built.weights.clear()  # no arm changes weights
    memory = built.store.link.arena.memory
    engine = [Arm(ENGINE_ARM, ActivationPlan("none"), ENGINE_METHOD)]
    layer_forward: dict[int, float] = {}
    for length in () if settings.engine else settings.lengths:
        built.store.plan = ActivationPlan("none")
        layer_forward[length] = layer_seconds(built, length, LAYER_REPEATS)[0]
    runs = [
        (host_gb, length, arm)
        for host_gb in settings.host_gb
        for length in settings.lengths
        for arm in (engine if settings.engine else wanted(arms_of(settings, length, host_gb), settings))
    ]
    for host_gb, length, arm in progress(runs, lambda run: f"{run[1]} tokens, {run[2].name}"):
        arena = HostArena(memory[: int(host_gb * 1e9)])
        built.store.link = make_link(arena, settings.on_cuda)  # without pending copies of the previous arm
        figures = measure(built, arm, length, settings)
        rows.append({"host_budget_gb": host_gb, "num_tokens": length, "arm": arm.name, **figures})
        print(row_text(rows[-1]), flush=True)
    tokens = longest_tokens(built, settings) if settings.with_sweep and not settings.engine else {}
    first = [row for row in rows if row["host_budget_gb"] == settings.host_gb[0]]
    targets = verdicts(first, layer_forward, settings.shape.num_layers, tokens)
    print("\n".join(target.row for target in targets), flush=True)
    return {
        "rows": rows, "layer_forward_seconds": layer_forward, "longest_tokens": tokens,
        "targets": [asdict(target) for target in targets],
    }  # fmt: skip


def engine_rows(settings: Settings) -> list[dict[str, Any]]:
    """Return the rows of Megatron's fine-grained offload from a separate process; none without TransformerEngine."""
    if importlib.util.find_spec("transformer_engine") is None:
        print(f"{ENGINE_ARM}: TransformerEngine is not installed")
        return []
    command = [sys.executable, *sys.argv, "--engine", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENGINE_SETTING})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return [{"host_budget_gb": settings.host_gb[0], "num_tokens": length, "arm": ENGINE_ARM, "error": lines[-1]}
                for length in settings.lengths]  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    for row in rows:
        print(row_text(row), flush=True)
    return rows


def row_text(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    head = f"{row['host_budget_gb']:7.3g} GB {row['num_tokens']:8} {row['arm']:40}"
    if "error" in row:
        return f"{head} {row['error']}"
    predicted = f" (predicted {row['predicted_peak_gb']:7.2f})" if row["predicted_peak_gb"] else ""
    stall = "-" if row["stall_seconds"] is None else f"{row['stall_seconds'] * 1e3:.2f}"
    return (
        f"{head} {row['step_seconds'] * 1e3:10.2f} ms  stall {stall:>8} ms  MFU {row['mfu']:6.1%}  "
        f"allocated {row['peak_allocated_gb']:7.2f}{predicted} reserved {row['peak_reserved_gb']:7.2f} "
        f"host {row['host_gb']:7.2f} GB  loss {row['loss']:.6f}"
    )


def parse() -> tuple[Settings, argparse.Namespace]:
    """Return the settings of the command line."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--host-bound", action="store_true", help="a 3B model with little host memory; no sweep")
    parser.add_argument("--all", action="store_true", help="every arm and length, sweep and search (hours)")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sequence")
    parser.add_argument("--host-memory-gb", type=float, nargs="+", help="budgets of host memory")
    parser.add_argument(
        "--activation-gb", type=float, help="memory for activations (92 %% of the memory without states)"
    )
    parser.add_argument("--link-gb-per-second", type=float, default=55.0, help="one way (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of an arm (%(default)s)")
    parser.add_argument("--cost-file", type=Path, help="cost file that gpu_activations_calibrate.py writes")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="bf16 peak of the device (%(default)s)")
    parser.add_argument("--arms", nargs="+", default=(), metavar="NAME", help="run only these arms of the table")
    parser.add_argument("--engine", action="store_true", help="run only Megatron's fine-grained offload")
    args = parse_on_gpu(parser)
    shape, lengths, host_gb = SHAPE, ALL_LENGTHS if args.all else LENGTHS, (100.0,)
    if args.host_bound:
        shape, lengths = HOST_BOUND_SHAPE, ALL_HOST_BOUND_LENGTHS if args.all else HOST_BOUND_LENGTHS
        host_gb = ALL_HOST_BOUND_GB if args.all else HOST_BOUND_GB
    everything = args.all or args.quick
    settings = Settings(
        shape=TINY if args.quick else shape,
        lengths=TINY_LENGTHS if args.quick else tuple(args.lengths or lengths),
        on_cuda=args.device == "cuda",
        host_gb=(0.01,) if args.quick else tuple(args.host_memory_gb or host_gb),
        device_gb=args.activation_gb or 110.0,
        link_gb_per_second=args.link_gb_per_second,
        num_steps=2 if args.quick else args.steps,
        cost_file=args.cost_file,
        peak_flops=args.peak_tflops * 1e12,
        engine=args.engine,
        is_tiny=args.quick,
        arms=tuple(args.arms) or (() if everything else MAIN_ARMS),
        with_sweep=everything and not args.host_bound,
    )
    if settings.on_cuda and args.activation_gb is None:
        whole = torch.cuda.get_device_properties(0).total_memory / 1e9
        settings = replace(settings, device_gb=USABLE * whole - settings.states_gb)
    return settings, args


def main() -> None:
    """Measure and print."""
    settings, args = parse()
    figures = run(settings)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
