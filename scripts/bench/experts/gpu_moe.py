"""Measure the experts of a layer on one GPU: grouped products of slots against those of homes, and a busy rank's time.

    .venv/bin/python scripts/bench/experts/gpu_moe.py [--json]

64 experts on 8 ranks, 12 slots each; the GPU stands for one rank after the other. *balanced* has equal loads and no
replicas: products of 8 homes, then of 12 slots of which 4 are empty, with the map of tokens to slots; their ratio is
the overhead. *busy* has the loads of ``drift.py``: the slowest of the ranks with static placement and with flexmoe,
forward and backward, without the exchanges between ranks. ``--device cpu`` runs tiny sizes, as a test of the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.flexmoe import follow
from bytescale_ext.plan.experts.placement import PARTS, PlacementPlan
from megatron.bytescale.core.transformer.moe.slots import SlotTable
from scripts.bench.experts.drift import EXPERTS, RANKS, SHAPE, SLOTS, THRESHOLD, Drift, drifting_loads

TOPK = 2


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        device: where.
        dtype: of tokens and weights.
        hidden, ffn: widths of a token and of an expert.
        tokens: that each rank routes.
        repeats: of each measurement.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    ffn: int
    tokens: int
    repeats: int


ON_CUDA = Settings(torch.device("cuda"), torch.bfloat16, 4096, 1376, 32768, 20)
TINY = Settings(torch.device("cpu"), torch.float32, 16, 24, 64, 3)


def grouped_product(tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return [tokens, n]: the rows up to each of ``ends`` [slots] times the weights [slots, k, n] of their slot."""
    if tokens.is_cuda:
        return torch._grouped_mm(tokens, weights, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = zip(tokens.split(sizes), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def rank_pass(settings: Settings, counts: Sequence[int]) -> Callable[[], None]:
    """Return what computes the slots of a rank with so many tokens each, forward and backward (gated experts)."""
    options = {"device": settings.device, "dtype": settings.dtype}
    shapes = (settings.hidden, 2 * settings.ffn), (settings.ffn, settings.hidden)
    first, second = (torch.randn(len(counts), *shape, **options).requires_grad_() for shape in shapes)
    tokens = torch.randn(sum(counts), settings.hidden, **options).requires_grad_()
    ends = torch.tensor(counts, device=settings.device).cumsum(0).to(torch.int32)

    def run() -> None:
        gate, up = grouped_product(tokens, first, ends).chunk(2, -1)
        output = grouped_product(torch.nn.functional.silu(gate) * up, second, ends)
        output.backward(output.detach())
        tokens.grad = first.grad = second.grad = None

    return run


def median_seconds(run: Callable[[], None], settings: Settings) -> float:
    """Return the median seconds of a run after two to warm up."""
    seconds = []
    for _ in range(settings.repeats + 2):
        if settings.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if settings.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def balanced(settings: Settings) -> dict[str, float]:
    """Return milliseconds of a balanced rank with homes alone, with empty slots beside them, and the overhead."""
    homes = EXPERTS // RANKS
    each = settings.tokens * TOPK // homes
    table = SlotTable.of(PlacementPlan.static(EXPERTS, RANKS, SLOTS), settings.device)
    probs = torch.rand(settings.tokens, EXPERTS, device=settings.device)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, probs.topk(TOPK, -1).indices, True)
    of_homes, of_slots = (rank_pass(settings, [each] * homes + [0] * empty) for empty in (0, SLOTS - homes))

    def with_slots() -> None:
        table.in_slots(probs, chosen, None)  # type: ignore[arg-type]  # without replicas no rank asks another
        of_slots()

    seconds = {"homes_ms": median_seconds(of_homes, settings), "slots_ms": median_seconds(with_slots, settings)}
    found = {name: 1e3 * value for name, value in seconds.items()}
    return {**found, "overhead": found["slots_ms"] / found["homes_ms"] - 1}


def busy(settings: Settings) -> dict[str, float]:
    """Return milliseconds of the slowest rank with static placement and with flexmoe, which knows the step before."""
    measured, loads = drifting_loads(Drift(0.05), 2, seed=0)[:, 0]
    cost = ExpertCost.of(SHAPE, flops=400e12, link_bytes=55e9)
    static = PlacementPlan.static(EXPERTS, RANKS, SLOTS)
    found = {}
    for name, plan in (("static", static), ("flexmoe", follow(static, measured, cost=cost, threshold=THRESHOLD))):
        parts = plan.parts() * loads.sum(0) * (RANKS * settings.tokens * TOPK / loads.sum()) / PARTS
        counts = [[int(parts[rank, expert]) for expert in np.nonzero(parts[rank])[0]] for rank in range(RANKS)]
        slowest = max(counts, key=sum)
        found[f"{name}_ms"] = 1e3 * median_seconds(rank_pass(settings, slowest), settings)
        found[f"{name}_tokens"] = float(sum(slowest))
    return {**found, "speedup": found["static_ms"] / found["flexmoe_ms"]}


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu runs tiny sizes")
    settings = ON_CUDA if args.device == "cuda" else TINY
    found = {"balanced": balanced(settings), "busy": busy(settings)}
    for name, figures in found.items():
        print(f"{name:9}" + "  ".join(f"{key} {value:,.3f}" for key, value in figures.items()))
    if args.json:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        print(json.dumps({"device": name, "tokens": settings.tokens, **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
