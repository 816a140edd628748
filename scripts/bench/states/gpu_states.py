"""Measure the optimizer's step with Adam's states in pages against resident states and against the prediction.

    .venv/bin/python scripts/bench/states/gpu_states.py [--json]
    OMP_NUM_THREADS=1 .venv/bin/python scripts/bench/states/gpu_states.py --device cpu --parameters 20e6

Both arms update the same bf16 parameters with the same gradients, and their results must be equal to the last bit. The
script first measures the speeds of this machine: copies of a page in both directions, and Adam on a page. *Predicted*
is a replay of the step's moves at these speeds. ``--device cpu --quick`` runs tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds, optimizer_step_seconds, time_moves
from bytescale_ext.states.adam import PagedAdam, PagedParameter
from scripts.bench.gpu import gpu_parser, median_seconds, parse_on_gpu, repeated_seconds
from scripts.bench.progress import progress

LARGEST = 1 << 24  # elements of the largest parameter: a matrix of a 7B model
HALF_BYTES, FLOAT_BYTES = 2, 4


def speeds_of(page_bytes: int, device: torch.device, repeats: int) -> Speeds:
    """Return the speed of the link in its slower direction and the speed of Adam, both on pages."""
    count, on_cuda = page_bytes // FLOAT_BYTES, device.type == "cuda"
    host = torch.zeros(count, pin_memory=on_cuda)
    near = torch.zeros(count, device=device)
    copies = [median_seconds(lambda: near.copy_(host, non_blocking=True), repeats, on_cuda),
              median_seconds(lambda: host.copy_(near, non_blocking=True), repeats, on_cuda)]  # fmt: skip
    parameter = torch.zeros(count)
    parameter.grad = torch.ones(count)
    adam = torch.optim.AdamW([parameter], fused=on_cuda)  # the kernel that updates pages
    updates = median_seconds(adam.step, repeats, on_cuda=False)
    return Speeds(page_bytes / max(copies), count * ADAM_BYTES / updates)


class Arm:
    """bf16 parameters, their float32 copies, and the optimizer of the copies, as in Megatron."""

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        sizes = [LARGEST] * (num_parameters // LARGEST) + [num_parameters % LARGEST] * (num_parameters % LARGEST > 0)
        torch.manual_seed(0)
        self.model = [torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes]
        self.gradients = [torch.randn(size, device=device) for size in sizes]
        self.main = [parameter.float() for parameter in self.model]
        self.optimizer = torch.optim.AdamW(self.main, lr=1e-3, fused=device.type == "cuda")

    def step(self) -> None:
        """Update the parameters on the device."""
        for parameter, gradient in zip(self.main, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for target, source in zip(self.model, self.main, strict=True):
            target.copy_(source)


class PagedArm(Arm):
    """The same parameters with states in pages."""

    def __init__(self, num_parameters: int, device: torch.device, page_bytes: int) -> None:
        super().__init__(num_parameters, device)
        parameters = [PagedParameter(*pair) for pair in zip(self.main, self.model, strict=True)]
        self.adam = PagedAdam(self.optimizer, parameters, StateConfig(page_bytes, math.inf), device.type == "cuda")

    def step(self) -> None:
        """Update the parameters page by page."""
        self.adam.begin_step()
        for parameter, gradient in zip(self.main, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both arms, which step in turn."""
    device, page_bytes = torch.device(args.device), int(args.page_mb * 2**20)
    speeds = speeds_of(page_bytes, device, args.repeats)
    arms = {"resident": Arm(int(args.parameters), device), "paged": PagedArm(int(args.parameters), device, page_bytes)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in progress(range(args.repeats), lambda number: f"step {number + 1} of both arms"):
        for name, arm in arms.items():
            seconds[name] += repeated_seconds(arm.step, 1, device.type == "cuda")
    equal = all(map(torch.equal, arms["resident"].model, arms["paged"].model))
    table = arms["paged"].adam.table  # type: ignore[attr-defined]
    return {
        "parameters": int(args.parameters), "pages": table.num_host_pages, "host_bytes": table.host_bytes,
        "link_gb_per_second": speeds.link_bytes_per_second / 1e9,
        "adam_gb_per_second": speeds.adam_bytes_per_second / 1e9,
        **{f"{name}_seconds": statistics.median(steps) for name, steps in seconds.items()},
        "predicted_seconds": optimizer_step_seconds(time_moves(table, HALF_BYTES, speeds)), "equal": equal,
    }  # fmt: skip


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--parameters", type=float, default=2e9, help="28 bytes each, for both arms (2e9: 56 GB)")
    parser.add_argument("--page-mb", type=float, default=4.0, help="size of a page in MiB (4)")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each arm (5)")
    args = parse_on_gpu(parser)
    if args.quick:
        args.parameters, args.page_mb, args.repeats = 1e5, 0.0625, 2
    return args


def main() -> None:
    """Measure and print."""
    args = options()
    figures = measure(args)
    resident, paged, predicted = (figures[f"{name}_seconds"] for name in ("resident", "paged", "predicted"))
    print(
        f"{figures['parameters'] / 1e6:,.1f} M parameters: resident {1e3 * resident:.1f} ms, paged "
        f"{1e3 * paged:.1f} ms ({paged / resident:.2f} times), predicted / measured {predicted / paged:.2f}; "
        f"link {figures['link_gb_per_second']:.1f} GB/s, Adam {figures['adam_gb_per_second']:.1f} GB/s; "
        f"{'equal' if figures['equal'] else 'different'} results"
    )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
