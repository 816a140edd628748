"""Measures what the placement of experts plans with: an expert's products, exchanges of tokens, the copy of an expert.

These are the constants of FlexMoE's cost model (Nie et al. 2023), here of one micro-batch (``plan.experts.cost``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from bytescale_ext.measure.speeds import LENGTHS_ON_CUDA, Timer
from bytescale_ext.plan.cost.model_shape import BACKWARD_PER_FORWARD
from bytescale_ext.plan.experts.cost import ExpertCost

MESSAGE_BYTES: Final = 1 << 22
"""That a rank sends in one exchange of tokens."""

REPEATS: Final = 5
CPU_FLOPS_PER_PASS: Final = 2e8
"""On CPU the longer forward pass takes about this many FLOPs, so that it takes a fraction of a second."""


@dataclass(frozen=True)
class ExpertSize:
    """What an expert on one rank consists of.

    Attributes:
        weights: how many.
        hidden: width of a token.
        element_bytes: of a weight and of an element of a token.
    """

    weights: int
    hidden: int
    element_bytes: int

    def described(self, cost: ExpertCost) -> str:
        """Return the cost as text, speeds in the units of ``--moe-placement-speeds``."""
        tflops = 2e-12 * self.weights * (1 + BACKWARD_PER_FORWARD) / cost.token_seconds
        link = 1e-9 * self.hidden * self.element_bytes / cost.exchange_seconds
        return (
            f"{tflops:.4g} TFLOP/s in an expert, {link:.4g} GB/s in exchanges of tokens, "
            f"{1e3 * cost.copy_seconds:.4g} ms for the weights of an expert"
        )


def measured_lengths(weights: int, on_cuda: bool) -> tuple[int, int]:
    """Return the numbers of tokens for which an expert of so many weights is timed: equal on all ranks."""
    if on_cuda:
        return LENGTHS_ON_CUDA
    longer = min(max(int(CPU_FLOPS_PER_PASS / (2 * weights)), 64), 1024)
    return longer // 4, longer


def token_seconds(compute: Callable[[int], object], lengths: tuple[int, int], timer: Timer) -> float:
    """Return the seconds by which ``compute`` grows with each token, between two numbers of tokens.

    So the time of starting kernels cancels. Where noise makes the longer one faster, its own seconds count.
    """
    fewer, more = (timer.fastest(partial(compute, length)) for length in lengths)
    grown = (more - fewer) / (lengths[1] - lengths[0])
    return grown if grown > 0 else more / lengths[1]


def exchange_seconds(
    group: dist.ProcessGroup, sent: Sequence[int], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of an all-to-all: the best of some, after one to warm up. Collective over ``group``.

    Args:
        group: two or more ranks.
        sent: bytes that each rank sends to the member at its own number plus 0, 1, 2, ...: equal on all ranks.
        device: of the bytes.
        clock: seconds.
    """
    rank, size = group.rank(), group.size()
    to, of = ([sent[sign * (other - rank) % size] for other in range(size)] for sign in (1, -1))
    given = torch.zeros(sum(sent), dtype=torch.uint8, device=device)
    arrived = torch.empty_like(given)
    fastest = float("inf")
    for repeat in range(1 + REPEATS):  # as many on all ranks
        begun = clock()
        dist.all_to_all_single(arrived, given, of, to, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - begun
        fastest = min(fastest, seconds) if repeat else fastest
    return fastest


def link_seconds(size: ExpertSize, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a token and of an expert's weights on the link of a rank. Collective over ``group``."""
    others = group.size() - 1
    part = max(1, MESSAGE_BYTES // others)
    tokens = exchange_seconds(group, [0, *[part] * others], device)
    weights = exchange_seconds(group, [0, size.weights * size.element_bytes, *[0] * (others - 1)], device)
    return tokens / (part * others) * size.hidden * size.element_bytes, weights


def agreed_cost(seconds: Sequence[float], device: torch.device) -> ExpertCost:
    """Return the cost of the slowest rank, equal on all ranks. Collective over all processes; zeros do not count.

    ``seconds``: the constants in the order of ``ExpertCost``.
    """
    agreed = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return ExpertCost(*agreed.tolist())
