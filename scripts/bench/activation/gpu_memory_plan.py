"""Measure memory plans on one GPU: torch's allocator, expandable segments, rounding buffers, and the whole plan.

    .venv/bin/python scripts/bench/activation/gpu_memory_plan.py [--json]

All arms train the same model on the same sequences, whose lengths change from step to step. Each arm has its own
process, because a process chooses its allocator when it starts. *buffers* gives swapped layers two rounding buffers;
*plan* also reserves the planned peak as one segment, as ``--memory-plan`` does. The table has median and longest step
time, peak allocated and reserved memory, calls of cudaMalloc, and retries (memory returned to the device and requested
again). ``--device cpu --quick`` runs tiny sizes, without figures of the allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.activation.buffers import RoundingBuffers, reserve
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.memory.step_file import StepMemory
from megatron.bytescale.training.one_device import build_model
from scripts.bench.activation.models import LOSS_TOKENS, SHAPE, TINY
from scripts.bench.gpu import gpu_parser, parse_on_gpu
from scripts.bench.progress import progress
from scripts.bench.report import ROOT

ACTIVATIONS = ActivationPlan("memo", 0.5, 0.5, 1.0, False, 2)
LONGEST, STEPS, WARM_UP = 65536, 6, 2
ALLOCATOR = "PYTORCH_ALLOC_CONF"
ARMS = {
    "default": "",
    "expandable segments": "expandable_segments:True",
    "buffers": "",
    "plan": "",
}


def lengths_of(longest: int, num_steps: int) -> list[int]:
    """Return the tokens of each step: the longest length, then random lengths between half and all of it."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(WARM_UP + num_steps - 1, generator=generator).tolist()
    return [longest, *(int(longest * (0.5 + share / 2)) for share in shares)]


def run_arm(arm: str, memory: StepMemory, on_cuda: bool, host_gb: float, num_steps: int) -> dict[str, Any]:
    """Run one arm in this process and return its figures."""
    record = memory.record
    dtype = torch.bfloat16 if on_cuda else torch.float32
    built = build_model(
        record.shape, dtype, int(host_gb * 1e9), record.loss_tokens, on_cpu=not on_cuda, traits=record.traits
    )
    built.weights.clear()
    built.store.plan = record.activations
    for parameter in built.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if arm in ("buffers", "plan"):
        built.store.buffers = RoundingBuffers(memory.buffer_bytes, built.device)
    if arm == "plan" and on_cuda:
        reserve(memory.plan.model.peak, built.device)
    seconds = []
    for number, length in enumerate(lengths_of(record.num_tokens, num_steps)):
        tokens = built.batch(length, seed=number)
        begun = time.perf_counter()
        loss = built.loss(tokens)
        loss.backward()
        value = float(loss.detach())
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        built.store.check_empty()
        built.model.zero_grad(set_to_none=False)
    timed = seconds[WARM_UP:]
    return {
        "arm": arm, "step_seconds": statistics.median(timed), "longest_step_seconds": max(timed), "loss": value,
        **(allocator_figures() if on_cuda else {}),
    }  # fmt: skip


def allocator_figures() -> dict[str, Any]:
    """Return the peaks, allocations and retries of torch's allocator in this process."""
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "device_allocations": stats.get("num_device_alloc"),
        "retries": stats.get("num_alloc_retries"),
    }


def plan_command(args: argparse.Namespace, path: Path) -> list[str]:
    """Return the words of the ``bytescale`` command that plans the longest step and writes the plan to ``path``."""
    shape = TINY if args.quick else SHAPE
    flags = (
        f"--num-layers {shape.num_layers} --hidden-size {shape.hidden} --num-attention-heads {shape.num_heads} "
        f"--ffn-hidden-size {shape.ffn_hidden} --swiglu --vocab-size {shape.vocab} --normalization RMSNorm "
        "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights"
    )
    words = [
        "memory-plan", "--model-flags", flags, "--seq-length", args.seq_length, "--activation-policy",
        ACTIVATIONS.policy, "--swap-fraction", ACTIVATIONS.swap, "--host-memory-gb", args.host_memory_gb,
        "--chunked-cross-entropy", LOSS_TOKENS, "--output", path, *(["--cpu"] if args.device == "cpu" else []),
    ]  # fmt: skip
    return [str(word) for word in words]


def read(path: Path) -> StepMemory:
    """Read a plan file. Raises ValueError if it is not a plan."""
    return StepMemory.from_json(json.loads(path.read_text()))


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return the plan and a row for each arm; if an arm fails, its row has the last line of its errors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        program = "import sys; from megatron.bytescale import cli; sys.exit(cli.main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", program, *plan_command(args, path)], check=True, cwd=ROOT)
        memory = read(path)
        rows = []
        for arm in progress(list(ARMS)):
            command = [sys.executable, *sys.argv, "--arm", arm, "--plan", str(path)]
            environment = {**os.environ, **({ALLOCATOR: ARMS[arm]} if ARMS[arm] else {})}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no message"]
            rows.append(json.loads(lines[-1]) if done.returncode == 0 else {"arm": arm, "error": lines[-1]})
            print(row_text(rows[-1]), flush=True)
    plan = memory.plan.model
    return {
        "num_tokens": memory.record.num_tokens, "activations": asdict(memory.record.activations),
        "plan": {"bound_bytes": plan.bound, "peak_bytes": plan.peak, "buffer_bytes": memory.buffer_bytes},
        "rows": rows,
    }  # fmt: skip


def row_text(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    if "error" in row:
        return f"{row['arm']:20} {row['error']}"
    text = f"{row['arm']:20} {row['step_seconds'] * 1e3:10.2f} ms, longest {row['longest_step_seconds'] * 1e3:10.2f} ms"
    if "peak_reserved_gb" not in row:
        return text
    return (
        f"{text}  allocated {row['peak_allocated_gb']:7.2f} reserved {row['peak_reserved_gb']:7.2f} GB  "
        f"device allocations {row['device_allocations']} retries {row['retries']}"
    )


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=LONGEST, help="tokens of the longest step (%(default)s)")
    parser.add_argument("--host-memory-gb", type=float, default=80.0, help="host memory for activations (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of an arm (%(default)s)")
    parser.add_argument("--arm", choices=ARMS, help="run only this arm, with --plan; ends with a line of JSON")
    parser.add_argument("--plan", type=Path, metavar="F.json", help="plan that --arm runs")
    args = parse_on_gpu(parser)
    if args.quick:
        args.seq_length, args.host_memory_gb, args.steps = 128, 0.01, 3
    return args


def main() -> None:
    """Measure and print."""
    args = options()
    if args.arm is not None:
        print(json.dumps(run_arm(args.arm, read(args.plan), args.device == "cuda", args.host_memory_gb, args.steps)))
        return
    figures = run_all(args)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
