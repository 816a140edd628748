"""Step time, memory and utilisation of activation policies against what Megatron and torch offer, on one GPU.

    .venv/bin/python scripts/bench/gpu_activations.py [--cost cost.json] [--json]

7B width, 8 layers, one sequence a step, forward and backward without optimizer; the same attention kernel and the same
chunked loss in every arm; the median of 10 steps; recomputed work is not counted in MFU. Stalls, for which computing
waits for copies, are measured in two steps more. An arm that runs out of memory says so. Megatron's fine-grained
offload needs TransformerEngine's layers: where that is installed it runs in a process of its own.
``gpu_activations_host_bound.py`` calls it with another model. ``--device cpu --quick`` runs tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.cost_file import read_cost  # noqa: E402
from bytescale_ext.plan.activation import (  # noqa: E402
    ActivationPlan,
    LayerLoad,
    Machine,
    cost_of_rates,
    forecast,
    layer_load,
)
from bytescale_ext.plan.activation_policy import make_plan  # noqa: E402
from bytescale_ext.plan.cost import ModelShape, model_flops  # noqa: E402
from megatron.bytescale.one_device import OneDeviceModel, build_model, end_fine_grained_step  # noqa: E402
from scripts.bench.offloaded_inputs import OffloadedInputs  # noqa: E402

SHAPE = ModelShape(8, 4096, 32, 32, 128, 11008, True, 32000)
TINY = ModelShape(4, 64, 2, 2, 32, 128, True, 256)
LENGTHS = (8192, 16384, 32768, 65536, 98304, 131072, 196608)
TINY_LENGTHS = (64, 130)
ALPHAS = (0.25, 0.5, 0.75, 1.0)
LOSS_TOKENS = 4096
WARM_UP = 2
STALL_STEPS = 2
ENGINE_ARM = "fine-grained offload (TransformerEngine)"
ENGINE_WAY = "engine"
RATES = (650e12, 600e12, 500e12)


@dataclass(frozen=True)
class Settings:
    """What one run of the benchmark measures."""

    shape: ModelShape
    lengths: tuple[int, ...]
    on_cuda: bool
    host_gb: tuple[float, ...]
    device_gb: float
    link_gb_per_second: float
    num_steps: int
    cost_file: Path | None
    peak_flops: float
    engine: bool = False


@dataclass(frozen=True)
class Arm:
    """One way to remember activations: a plan of ours, or a way of Megatron's or torch's by name."""

    name: str
    plan: ActivationPlan
    way: str = ""


def load_of(settings: Settings, length: int) -> LayerLoad:
    """The micro-batch of a length, for the plans."""
    if settings.cost_file is None:
        cost = cost_of_rates(settings.shape, *RATES)
    else:
        measured = read_cost(settings.cost_file)
        cost = replace(measured, shape=replace(measured.shape, num_layers=settings.shape.num_layers))
    return layer_load(cost, length, loss_tokens=LOSS_TOKENS, element_bytes=2 if settings.on_cuda else 4)


def arms_of(settings: Settings, length: int, host_gb: float, with_sweep: bool = True) -> list[Arm]:
    """All arms of a length; a policy that cannot fit its budgets is left out."""
    off, load = ActivationPlan("none"), load_of(settings, length)
    machine = Machine(settings.device_gb * 1e9, host_gb * 1e9, settings.link_gb_per_second * 1e9)
    arms = [
        Arm("none", off),
        Arm("full recompute", off, "full"),
        Arm("full recompute, inputs on host", off, "full, inputs on host"),
        Arm("recompute MLP", off, "mlp"),
        Arm("save_on_cpu", off, "save_on_cpu"),
        Arm("keep attention output", ActivationPlan("shares", 0.0, 1.0, 0.0)),
        Arm("alpha 0", ActivationPlan("memo", 0.0, 1.0, 1.0, False, 2)),
    ]
    for policy in ("memo", "priced"):
        with contextlib.suppress(ValueError):
            arms.append(Arm(policy, make_plan(policy, load, machine)))
    tight = forecast(next(arm.plan for arm in arms if arm.name == "alpha 0"), load, machine).device_bytes
    with contextlib.suppress(ValueError):
        arms.append(Arm("priced, no memory to spare", make_plan("priced", load, replace(machine, device_bytes=tight))))
    if with_sweep:
        arms += [Arm(f"alpha {alpha:g}", ActivationPlan("memo", alpha, 1 - alpha, 1.0, False, 2)) for alpha in ALPHAS]
    return arms


@contextlib.contextmanager
def in_way(built: OneDeviceModel, way: str) -> Iterator[None]:
    """Switch on a way of Megatron's or torch's, and off again."""
    if way == ENGINE_WAY:  # its model was built that way
        yield
        end_fine_grained_step()
        return
    config, layers = built.model.decoder.config, built.model.decoder.layers
    try:
        if way.startswith("full"):
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
        for layer in layers:
            layer.recompute_mlp = way == "mlp"
        with contextlib.ExitStack() as stack:
            if way == "save_on_cpu":
                stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=built.device.type == "cuda"))
            if way.endswith("inputs on host"):
                stack.enter_context(OffloadedInputs(built.store.link, len(layers)).during(built.model.decoder))
            yield
    finally:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
        for layer in layers:
            layer.recompute_mlp = False


def one_step(built: OneDeviceModel, arm: Arm, tokens: torch.Tensor) -> float:
    """Forward and backward; the loss."""
    with in_way(built, arm.way):
        loss = built.loss(tokens)
        loss.backward()
    value = float(loss.detach())  # waits for the forward pass
    if built.device.type == "cuda":
        torch.cuda.synchronize()
    built.model.zero_grad(set_to_none=False)
    return value


def stall_seconds(built: OneDeviceModel, arm: Arm, tokens: torch.Tensor) -> float | None:
    """For how long a step computes nothing because a copy is awaited; None where torch copies by itself."""
    if arm.way in ("save_on_cpu", ENGINE_WAY):
        return None
    link = built.store.link
    link.timed = True
    for _ in range(STALL_STEPS):
        one_step(built, arm, tokens)
    return link.take_stall_seconds() / STALL_STEPS


def measure(built: OneDeviceModel, arm: Arm, length: int, settings: Settings) -> dict[str, Any]:
    """Figures of one arm at one length, or {"error": "out of memory"}."""
    built.store.plan = arm.plan
    built.reset()
    tokens = built.batch(length, seed=0)
    seconds: list[float] = []
    loss = 0.0
    if settings.on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(settings.num_steps + WARM_UP):
            begun = time.perf_counter()
            loss = one_step(built, arm, tokens)
            seconds.append(time.perf_counter() - begun)
        counts = built.store.take_counts()
        stalls = stall_seconds(built, arm, tokens)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    step = statistics.median(seconds[WARM_UP:])
    machine = Machine(settings.device_gb * 1e9, settings.host_gb[0] * 1e9, settings.link_gb_per_second * 1e9)
    predicted = forecast(arm.plan, load_of(settings, length), machine)
    return {
        "step_seconds": step,
        "stall_seconds": stalls,
        "loss": loss,
        "mfu": model_flops(settings.shape, [length]) / step / settings.peak_flops,
        "peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if settings.on_cuda else 0.0,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if settings.on_cuda else 0.0,
        "host_gb": built.store.link.arena.peak_bytes / 1e9,
        "swapped_bytes": counts.swapped_bytes // len(seconds),
        "overflowed_bytes": counts.overflowed_bytes // len(seconds),
        "recomputed_flops": counts.recomputed_flops // len(seconds),
        "alpha": arm.plan.swap,
        "predicted_device_gb": predicted.device_bytes / 1e9,
        "predicted_layers_seconds": predicted.step_seconds,
    }


def run(settings: Settings, with_sweep: bool = True) -> list[dict[str, Any]]:
    """Rows for every host budget, length and arm; budgets are views of one arena, which is pinned once."""
    from bytescale_ext.activation.arena import HostArena
    from bytescale_ext.activation.link import make_link

    rows = engine_rows(settings) if settings.on_cuda and not settings.engine else []
    dtype = torch.bfloat16 if settings.on_cuda else torch.float32
    most = int(max(settings.host_gb) * 1e9)
    built = build_model(
        settings.shape, dtype, most, LOSS_TOKENS, on_cpu=not settings.on_cuda, fine_grained_offload=settings.engine
    )
    memory = built.store.link.arena.memory
    engine = [Arm(ENGINE_ARM, ActivationPlan("none"), ENGINE_WAY)]
    for host_gb in settings.host_gb:
        for length in settings.lengths:
            for arm in engine if settings.engine else arms_of(settings, length, host_gb, with_sweep):
                arena = HostArena(memory[: int(host_gb * 1e9)])
                built.store.link = make_link(arena, settings.on_cuda)  # nothing of the arm before waits in it
                figures = measure(built, arm, length, settings)
                rows.append({"host_budget_gb": host_gb, "num_tokens": length, "arm": arm.name, **figures})
                print(row_text(rows[-1]), flush=True)
    return rows


def engine_rows(settings: Settings) -> list[dict[str, Any]]:
    """Rows of Megatron's fine-grained offload, by a process of its own; none without TransformerEngine."""
    if importlib.util.find_spec("transformer_engine") is None:
        print(f"{ENGINE_ARM}: TransformerEngine is not installed")
        return []
    command = [sys.executable, *sys.argv, "--engine", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return [{"host_budget_gb": settings.host_gb[0], "num_tokens": length, "arm": ENGINE_ARM, "error": lines[-1]}
                for length in settings.lengths]  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    for row in rows:
        print(row_text(row), flush=True)
    return rows


def row_text(row: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{row['host_budget_gb']:7.3g} GB {row['num_tokens']:8} {row['arm']:40}"
    if "error" in row:
        return f"{head} {row['error']}"
    stall = "-" if row["stall_seconds"] is None else f"{row['stall_seconds'] * 1e3:.2f}"
    return (
        f"{head} {row['step_seconds'] * 1e3:10.2f} ms  stall {stall:>8} ms  MFU {row['mfu']:6.1%}  "
        f"allocated {row['peak_allocated_gb']:7.2f} reserved {row['peak_reserved_gb']:7.2f} "
        f"host {row['host_gb']:7.2f} GB  loss {row['loss']:.6f}"
    )


def parse(
    shape: ModelShape, lengths: tuple[int, ...], host_gb: tuple[float, ...]
) -> tuple[Settings, argparse.Namespace]:
    """The settings of the command line, with these defaults."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--host-gb", type=float, nargs="+", default=host_gb)
    parser.add_argument("--device-gb", type=float, default=110.0, help="for activations")
    parser.add_argument("--link-gb-per-second", type=float, default=55.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cost", type=Path, help="of gpu_activations_calibrate.py")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the device in bf16, for MFU")
    parser.add_argument("--engine", action="store_true", help="only Megatron's fine-grained offload")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --quick runs tiny sizes")
    chosen = TINY if args.quick else shape
    return Settings(
        chosen, TINY_LENGTHS if args.quick else tuple(args.lengths), on_cuda, (0.01,) if args.quick else
        tuple(args.host_gb), args.device_gb, args.link_gb_per_second, 2 if args.quick else args.steps, args.cost,
        args.peak_tflops * 1e12, args.engine,
    ), args  # fmt: skip


def main() -> None:
    """Measure and print."""
    settings, args = parse(SHAPE, LENGTHS, (100.0,))
    rows = run(settings)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
