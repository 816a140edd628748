"""Measured speeds for the placement of experts: computation of an expert, exchange of tokens, copy of an expert.

They are the constants of FlexMoE's cost model (Nie et al. 2023) for one micro-batch (``plan.experts.cost``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from bytescale_ext.measure.speeds import LENGTHS_ON_CUDA, Timer, run_seconds
from bytescale_ext.plan.cost.model_shape import BACKWARD_PER_FORWARD
from bytescale_ext.plan.experts.cost import ExpertCost

MESSAGE_BYTES: Final = 1 << 22
"""Bytes that a rank sends in one exchange of tokens."""

REPEATS: Final = 5
CPU_FLOPS_PER_PASS: Final = 2e8
"""Approximate FLOPs of the longer forward pass on CPU: few enough for a fraction of a second."""


@dataclass(frozen=True)
class ExpertSize:
    """Size of an expert on one rank.

    Attributes:
        weights: number of weights.
        width: width of a token.
        element_bytes: bytes of a weight, and of one element of a token.
    """

    weights: int
    width: int
    element_bytes: int

    def described(self, cost: ExpertCost) -> str:
        """Return the cost as text, with speeds in the units of ``--moe-placement-speeds``."""
        tflops = 2e-12 * self.weights * (1 + BACKWARD_PER_FORWARD) / cost.token_seconds
        link = 1e-9 * self.width * self.element_bytes / cost.exchange_seconds
        return (
            f"{tflops:.4g} TFLOP/s in an expert, {link:.4g} GB/s in exchanges of tokens, "
            f"{1e3 * cost.copy_seconds:.4g} ms for the weights of an expert"
        )


def timed_token_counts(weights: int, on_cuda: bool) -> tuple[int, int]:
    """Return the two numbers of tokens to time an expert with. They are equal on all ranks."""
    if on_cuda:
        return LENGTHS_ON_CUDA
    longer = min(max(int(CPU_FLOPS_PER_PASS / (2 * weights)), 64), 1024)
    return longer // 4, longer


def token_seconds(compute: Callable[[int], object], counts: tuple[int, int], timer: Timer) -> float:
    """Return the extra seconds of ``compute`` per token, measured between two numbers of tokens.

    The difference of the two times excludes the overhead of kernel launches. If noise makes the larger number faster,
    its seconds per token are returned instead.
    """
    fewer, more = (timer.fastest(partial(compute, count)) for count in counts)
    slope = (more - fewer) / (counts[1] - counts[0])
    return slope if slope > 0 else more / counts[1]


def all_to_all_seconds(group: dist.ProcessGroup, sent: Sequence[int], device: torch.device) -> float:
    """Return the seconds of an all-to-all: the fastest of several, after one for warm-up. Collective over ``group``.

    Args:
        group: group of two or more ranks.
        sent: bytes that each rank sends to the rank 0, 1, 2, ... after it in the group; equal on all ranks.
        device: device of the sent and received bytes.
    """
    rank, size = group.rank(), group.size()
    sent_to, received_from = ([sent[sign * (other - rank) % size] for other in range(size)] for sign in (1, -1))
    source = torch.zeros(sum(sent), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def exchange() -> None:
        dist.all_to_all_single(target, source, received_from, sent_to, group=group)

    return min([run_seconds(exchange, device) for _ in range(1 + REPEATS)][1:])  # equally many on all ranks


def link_seconds(size: ExpertSize, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the seconds that a token, and the weights of an expert, take on the link of a rank.

    Collective over ``group``.
    """
    others = group.size() - 1
    part = max(1, MESSAGE_BYTES // others)
    tokens = all_to_all_seconds(group, [0, *[part] * others], device)
    weights = all_to_all_seconds(group, [0, size.weights * size.element_bytes, *[0] * (others - 1)], device)
    return tokens / (part * others) * size.width * size.element_bytes, weights


def agreed_cost(seconds: Sequence[float], device: torch.device) -> ExpertCost:
    """Return the largest of each constant over all processes, so that all ranks plan alike. Collective over all.

    ``seconds``: constants of this rank in the order of ``ExpertCost``; 0 for a constant that it did not measure.
    """
    agreed = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return ExpertCost(*agreed.tolist())
