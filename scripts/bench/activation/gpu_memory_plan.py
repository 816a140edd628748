"""Measure memory plans on one GPU: torch's allocator, expandable segments, rounding buffers, the whole plan.

    .venv/bin/python scripts/bench/activation/gpu_memory_plan.py [--json]

Every arm trains the same model on the same sequences, whose lengths change from step to step. Each arm has its own
process, because an allocator is chosen when a process starts. *buffers* gives swapped layers two rounding buffers;
*plan* also reserves the planned peak as one segment, as ``--memory-plan`` does. Reported: median and spread of step
times, peak allocated and reserved, calls of cudaMalloc, retries (memory returned to the device and requested again),
and the plan's peak over its liveness bound. ``--device cpu --quick`` runs tiny sizes, without an allocator's figures.
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

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.activation.buffers import RoundingBuffers, reserve  # noqa: E402
from bytescale_ext.plan.activation.plan import ActivationPlan  # noqa: E402
from bytescale_ext.plan.memory.step_file import StepMemory  # noqa: E402
from megatron.bytescale.training.one_device import build_model  # noqa: E402
from scripts.bench.activation.gpu_options import LOSS_TOKENS, SHAPE, TINY, make_parser, parse  # noqa: E402

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
    """Return the longest length, then lengths between half of it and all of it, the same in every arm."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(WARM_UP + num_steps - 1, generator=generator).tolist()
    return [longest, *(int(longest * (0.5 + share / 2)) for share in shares)]


def run_arm(arm: str, memory: StepMemory, on_cuda: bool, host_gb: float, num_steps: int) -> dict[str, Any]:
    """Return the figures of one arm, run in this process."""
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
    """Return what torch's allocator did in this process."""
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "device_allocations": stats.get("num_device_alloc"),
        "retries": stats.get("num_alloc_retries"),
    }


def recording(args: argparse.Namespace, path: Path) -> list[str]:
    """Return the command line of ``bytescale`` that plans the longest step."""
    shape = TINY if args.quick else SHAPE
    flags = (
        f"--num-layers {shape.num_layers} --hidden-size {shape.hidden} --num-attention-heads {shape.num_heads} "
        f"--ffn-hidden-size {shape.ffn_hidden} --swiglu --vocab-size {shape.vocab} --normalization RMSNorm "
        "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights"
    )
    words = [
        "memory-plan", "--model-flags", flags, "--seq-length", args.seq_length, "--activation-policy",
        ACTIVATIONS.policy, "--swap-fraction", ACTIVATIONS.swap, "--host-memory-gb", args.host_gb,
        "--chunked-cross-entropy", LOSS_TOKENS, "--output", path, *(["--cpu"] if args.device == "cpu" else []),
    ]  # fmt: skip
    return [str(word) for word in words]


def read(path: Path) -> StepMemory:
    """Read a plan file. Raises ValueError for a file that is not a plan."""
    return StepMemory.from_json(json.loads(path.read_text()))


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return the plan and a row for each arm; the row of an arm that fails has its last line of errors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        program = "import sys; from megatron.bytescale import cli; sys.exit(cli.main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", program, *recording(args, path)], check=True, cwd=ROOT)
        memory = read(path)
        rows = []
        for arm, allocator in ARMS.items():
            command = [sys.executable, *sys.argv, "--arm", arm, "--plan", str(path)]
            environment = {**os.environ, **({ALLOCATOR: allocator} if allocator else {})}
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
    parser = make_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=LONGEST)
    parser.add_argument("--host-gb", type=float, default=80.0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--arm", choices=ARMS, help="run this one alone, with --plan; ends with a line of JSON")
    parser.add_argument("--plan", type=Path, metavar="F.json")
    args = parse(parser)
    if args.quick:
        args.seq_length, args.host_gb, args.steps = 128, 0.01, 3
    return args


def main() -> None:
    """Measure and print."""
    args = options()
    if args.arm is not None:
        print(json.dumps(run_arm(args.arm, read(args.plan), args.device == "cuda", args.host_gb, args.steps)))
        return
    figures = run_all(args)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
