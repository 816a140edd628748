"""Measure the experts of a layer on one GPU: the overhead of slots, and a busy rank's time with and without replicas.

    .venv/bin/python scripts/bench/experts/gpu_moe.py [--json]

64 experts on 8 ranks with 12 slots each; the GPU takes the place of one rank after the other. *balanced* has equal
loads and no replicas: grouped products of 8 homes, then of 12 slots with 4 empty ones and the map from tokens to slots.
Their ratio is the overhead. *busy* has the loads of ``drift.py``: the slowest rank with static placement and with
flexmoe, forward and backward, without the exchanges between ranks. ``--device cpu`` tests the script on tiny sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.flexmoe import follow
from bytescale_ext.plan.experts.placement import PARTS, PlacementPlan
from megatron.bytescale.core.transformer.moe.slots import SlotTable
from scripts.bench.experts.drift import EXPERTS, RANKS, SHAPE, SLOTS, THRESHOLD, Drift, drifting_loads
from scripts.bench.gpu import device_name, gpu_parser, median_seconds, parse_on_gpu

TOPK = 2


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurement.

    Attributes:
        device: device that computes.
        dtype: type of tokens and weights.
        hidden, ffn: widths of a token and of an expert.
        tokens: tokens that each rank routes.
        repeats: repeats of each measurement.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    ffn: int
    tokens: int
    repeats: int

    def milliseconds(self, run: Callable[[], None]) -> float:
        """Return the median time of a run."""
        return 1e3 * median_seconds(run, self.repeats, self.device.type == "cuda", warm_up=2)


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
    """Return a forward and backward pass of the gated experts of a rank; ``counts`` has the tokens of each slot."""
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


def balanced(settings: Settings) -> dict[str, float]:
    """Return milliseconds of a balanced rank with homes alone and with empty slots, and the overhead of slots."""
    homes = EXPERTS // RANKS
    each = settings.tokens * TOPK // homes
    table = SlotTable.of(PlacementPlan.static(EXPERTS, RANKS, SLOTS), settings.device)
    probs = torch.rand(settings.tokens, EXPERTS, device=settings.device)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, probs.topk(TOPK, -1).indices, True)
    run_homes, run_slots = (rank_pass(settings, [each] * homes + [0] * empty) for empty in (0, SLOTS - homes))

    def with_slots() -> None:
        table.in_slots(probs, chosen, None)  # type: ignore[arg-type]  # without replicas no rank asks another
        run_slots()

    homes_ms, slots_ms = settings.milliseconds(run_homes), settings.milliseconds(with_slots)
    return {"homes_ms": homes_ms, "slots_ms": slots_ms, "overhead": slots_ms / homes_ms - 1}


def busy(settings: Settings) -> dict[str, float]:
    """Return milliseconds of the slowest rank with static placement and with flexmoe, planned from the step before."""
    measured, loads = drifting_loads(Drift(0.05), 2, seed=0)[:, 0]
    cost = ExpertCost.of(SHAPE, flops=400e12, link_bytes=55e9)
    static = PlacementPlan.static(EXPERTS, RANKS, SLOTS)
    figures = {}
    for name, plan in (("static", static), ("flexmoe", follow(static, measured, cost=cost, threshold=THRESHOLD))):
        parts = plan.parts() * loads.sum(0) * (RANKS * settings.tokens * TOPK / loads.sum()) / PARTS
        counts = [[int(parts[rank, expert]) for expert in np.nonzero(parts[rank])[0]] for rank in range(RANKS)]
        slowest = max(counts, key=sum)
        figures[f"{name}_ms"] = settings.milliseconds(rank_pass(settings, slowest))
        figures[f"{name}_tokens"] = float(sum(slowest))
    return {**figures, "speedup": figures["static_ms"] / figures["flexmoe_ms"]}


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    args = parse_on_gpu(gpu_parser(str(__doc__).splitlines()[0]), words)
    settings = ON_CUDA if args.device == "cuda" else TINY
    if args.quick:
        settings = replace(TINY, device=settings.device, dtype=settings.dtype)
    results = {"balanced": balanced(settings), "busy": busy(settings)}
    for name, figures in results.items():
        print(f"{name:9}" + "  ".join(f"{key} {value:,.3f}" for key, value in figures.items()))
    if args.json:
        print(json.dumps({"device": device_name(args.device), "tokens": settings.tokens, **results}))


if __name__ == "__main__":
    main(sys.argv[1:])
