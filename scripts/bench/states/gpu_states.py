"""Measure the optimizer's step with Adam's states in pages: against resident states, and against its prediction.

    .venv/bin/python scripts/bench/states/gpu_states.py [--json]
    OMP_NUM_THREADS=1 .venv/bin/python scripts/bench/states/gpu_states.py --device cpu --parameters 20e6

Both arms update the same bf16 parameters with the same gradients; their results are compared to the last bit on CPU.
First the speeds of this machine are measured: copies of a page both ways, and Adam on a page. *Predicted* is the replay
of the step's moves at these speeds. ``--device cpu --quick`` runs tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # so that it also runs as a file

from bytescale_ext.config.memory.states import StateConfig  # noqa: E402
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds, replay, step_seconds  # noqa: E402
from bytescale_ext.states.adam import PagedAdam, PagedParameter  # noqa: E402

LARGEST = 1 << 24  # elements of a parameter, as of a matrix of a 7B model
HALF_BYTES, FLOAT_BYTES = 2, 4


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each repeat of some work, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return found[1:]


def speeds_of(page_bytes: int, device: torch.device, repeats: int) -> Speeds:
    """Return the speed of the slower direction of the link and of Adam, both on pages."""
    count = page_bytes // FLOAT_BYTES
    host = torch.zeros(count, pin_memory=device.type == "cuda")
    there = torch.zeros(count, device=device)
    copies = [seconds_of(lambda: there.copy_(host, non_blocking=True), device, repeats),
              seconds_of(lambda: host.copy_(there, non_blocking=True), device, repeats)]  # fmt: skip
    parameter = torch.zeros(count)
    parameter.grad = torch.ones(count)
    adam = torch.optim.AdamW([parameter], fused=device.type == "cuda")  # the kernel that pages run there
    updates = statistics.median(seconds_of(adam.step, torch.device("cpu"), repeats))
    return Speeds(page_bytes / max(map(statistics.median, copies)), count * ADAM_BYTES / updates)


class Arm:
    """bf16 parameters, their float32 copies and an optimizer of the copies, as Megatron has them."""

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        sizes = [LARGEST] * (num_parameters // LARGEST) + [num_parameters % LARGEST] * (num_parameters % LARGEST > 0)
        torch.manual_seed(0)
        self.model = [torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes]
        self.gradients = [torch.randn(size, device=device) for size in sizes]
        self.main = [one.float() for one in self.model]
        self.optimizer = torch.optim.AdamW(self.main, lr=1e-3, fused=device.type == "cuda")

    def step(self) -> None:
        """Update the parameters on the device."""
        for parameter, gradient in zip(self.main, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for target, source in zip(self.model, self.main, strict=True):
            target.copy_(source)


class PagedArm(Arm):
    """The same with states in pages."""

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
    """Return the figures of both arms, which take turns."""
    device, page_bytes = torch.device(args.device), int(args.page_mb * 2**20)
    speeds = speeds_of(page_bytes, device, args.repeats)
    arms = {"resident": Arm(int(args.parameters), device), "paged": PagedArm(int(args.parameters), device, page_bytes)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(args.repeats):
        for name, arm in arms.items():
            seconds[name] += seconds_of(arm.step, device, 1)
    equal = all(map(torch.equal, arms["resident"].model, arms["paged"].model))
    table = arms["paged"].adam.table  # type: ignore[attr-defined]
    return {
        "parameters": int(args.parameters), "pages": table.num_host_pages, "host_bytes": table.host_bytes,
        "link_gb_per_second": speeds.link_bytes_per_second / 1e9,
        "adam_gb_per_second": speeds.adam_bytes_per_second / 1e9,
        **{f"{name}_seconds": statistics.median(found) for name, found in seconds.items()},
        "predicted_seconds": step_seconds(replay(table, HALF_BYTES, speeds)), "equal": equal,
    }  # fmt: skip


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parameters", type=float, default=2e9, help="both arms take 28 bytes of each (2e9: 56 GB)")
    parser.add_argument("--page-mb", type=float, default=4.0, help="size of a page in MiB (4)")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each arm (5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    args = parser.parse_args()
    if args.quick:
        args.parameters, args.page_mb, args.repeats = 1e5, 0.0625, 2
    return args


def main() -> None:
    """Measure and print."""
    args = options()
    found = measure(args)
    ratio, error = (
        found["paged_seconds"] / found["resident_seconds"],
        found["predicted_seconds"] / found["paged_seconds"],
    )
    print(
        f"{found['parameters'] / 1e6:,.1f} M parameters: resident {1e3 * found['resident_seconds']:.1f} ms, paged "
        f"{1e3 * found['paged_seconds']:.1f} ms ({ratio:.2f} times), predicted / measured {error:.2f}; link "
        f"{found['link_gb_per_second']:.1f} GB/s, Adam {found['adam_gb_per_second']:.1f} GB/s; "
        f"{'equal' if found['equal'] else 'different'} results"
    )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
