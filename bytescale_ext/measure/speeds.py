"""Measures the speeds that activation plans depend on, in about a second: copies to host memory, and one layer's work.

The layer is the matrix products and the attention of the model's shape, forward and backward, at two lengths, so that
the cost of starting kernels cancels. Inputs are not random and weights are not the model's: nothing of the training
changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from bytescale_ext.attention.kernels.contract import Saved
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.plan.cost.model_shape import ModelShape

BUDGET_SECONDS: Final = 2.0
"""No measurement is repeated after this time; each runs at least twice."""

REPEATS: Final = 8
LINK_BYTES: Final = 1 << 26
LENGTHS_ON_CUDA: Final = (2048, 8192)
CPU_FLOPS_PER_PASS: Final = 1e9
"""On CPU the products of the longer length take this many FLOPs, so that a pass takes a fraction of a second."""

WORK: Final = ("products forward", "products backward", "attention forward", "attention backward")


@dataclass
class Timer:
    """Times work, until a deadline.

    Attributes:
        clock: seconds.
        synchronize: waits for the device.
        budget: seconds after which nothing is repeated.
    """

    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    budget: float = BUDGET_SECONDS
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.clock() - self._begun

    def fastest(self, run: Callable[[], object]) -> float:
        """Return the least seconds of some runs, after one to warm up; other work on the machine only adds time."""
        run()
        found = math.inf
        for _ in range(REPEATS):
            self.synchronize()
            begun = self.clock()
            run()
            self.synchronize()
            found = min(found, self.clock() - begun)
            if self.elapsed > self.budget:
                break
        return found


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs per second of matrix products, and of attention forward and backward."""

    products: float
    attention_forward: float
    attention_backward: float


def copy_seconds_per_byte(host: torch.Tensor, device: torch.device, timer: Timer) -> float:
    """Return the seconds for each byte between host memory [n], uint8, and the device: of the slower direction."""
    part = host[:LINK_BYTES]
    near = torch.empty(part.shape, dtype=torch.uint8, device=device)
    ways = ((part, near), (near, part))
    slower = max(timer.fastest(partial(to.copy_, source, non_blocking=True)) for to, source in ways)
    return slower / part.numel()


def product_sizes(shape: ModelShape, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (inputs, outputs) of the products of a dense layer on one of its tensor-parallel ranks."""
    heads = max(1, shape.num_heads // tensor_parallel) * shape.head_dim
    kv_heads = max(1, shape.num_kv_heads // tensor_parallel) * shape.head_dim
    ffn = max(1, shape.ffn_hidden // tensor_parallel)
    return (
        (shape.hidden, heads + 2 * kv_heads),
        (heads, shape.hidden),
        (shape.hidden, ffn * (2 if shape.gated else 1)),
        (ffn, shape.hidden),
    )


def product_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return the FLOPs of one token in these products, forward."""
    return 2.0 * sum(inputs * outputs for inputs, outputs in product_sizes(shape, tensor_parallel))


def measured_lengths(shape: ModelShape, tensor_parallel: int, on_cuda: bool) -> tuple[int, int]:
    """Return the two lengths at which a layer is measured: equal on all ranks."""
    if on_cuda:
        return LENGTHS_ON_CUDA
    longer = int(CPU_FLOPS_PER_PASS / product_flops(shape, tensor_parallel))
    longer = min(max(longer, 64), 1024)
    return longer // 4, longer


def layer_seconds(
    shape: ModelShape, tensor_parallel: int, kernel: Kernel, like: torch.Tensor, length: int, timer: Timer
) -> tuple[float, float, float, float]:
    """Return the seconds of ``WORK`` in one layer for one sequence; ``like`` [any shape] has the type and device."""
    sizes = product_sizes(shape, tensor_parallel)
    inputs = [_filled(like, length, size).requires_grad_() for size, _ in sizes]
    weights = [_filled(like, outputs, size).requires_grad_() for size, outputs in sizes]
    made: list[torch.Tensor] = []

    def multiply() -> None:
        made[:] = [torch.nn.functional.linear(*pair) for pair in zip(inputs, weights, strict=True)]

    def multiply_back() -> None:
        torch.autograd.grad(made, [*inputs, *weights], gradients, retain_graph=True)

    with torch.enable_grad():
        forward = timer.fastest(multiply)
        gradients = [one.detach() for one in made]
        backward = timer.fastest(multiply_back)
    return forward, backward, *_attention_seconds(shape, tensor_parallel, kernel, like, length, timer)


def _attention_seconds(
    shape: ModelShape, tensor_parallel: int, kernel: Kernel, like: torch.Tensor, length: int, timer: Timer
) -> tuple[float, float]:
    """Return the seconds of causal attention of one sequence, forward and backward; ``like``: [any shape]."""
    heads = max(1, shape.num_heads // tensor_parallel)
    kv_heads = max(1, shape.num_kv_heads // tensor_parallel)
    offsets = CuSeqlens.of_lengths((length,))
    block = AttentionBlock(offsets, offsets, True, shape.head_dim**-0.5)
    query = _filled(like, length, heads * shape.head_dim).view(length, heads, -1)
    key, value = (_filled(like, length, kv_heads * shape.head_dim).view(length, kv_heads, -1) for _ in range(2))
    with torch.no_grad():
        out, lse = kernel.forward(query, key, value, block)
        saved = Saved(query, key, value, out, lse)
        forward = timer.fastest(lambda: kernel.forward(query, key, value, block))
        return forward, timer.fastest(lambda: kernel.backward(query, saved, block))


def _filled(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a tensor [rows, columns] of different numbers in -1 to 1 that no random state decides."""
    numbers = torch.arange(rows * columns, device=like.device, dtype=torch.float32)
    return (numbers.mul_(0.618034).remainder_(2.0) - 1.0).view(rows, columns).to(like.dtype)


def rates_of(
    shape: ModelShape, tensor_parallel: int, lengths: Sequence[int], seconds: Sequence[Sequence[float]]
) -> Rates:
    """Return the rates by which the seconds of ``WORK`` grow between two lengths.

    Where noise makes the longer one faster, its own rate counts. Causal attention of s tokens takes
    ``2 s^2 head_dim num_heads`` FLOPs forward and 2.5 times as many backward (FlashAttention-2, Dao 2023, section 4.1).
    """
    heads = max(1, shape.num_heads // tensor_parallel)
    products, attention = product_flops(shape, tensor_parallel), 2.0 * shape.head_dim * heads
    flops = [(products * s, 2 * products * s, attention * s * s, 2.5 * attention * s * s) for s in lengths]
    (shorter, longer), (few, many) = seconds, flops

    def rate(*work: int) -> float:
        more_flops = sum(many[i] - few[i] for i in work)
        more_seconds = sum(longer[i] - shorter[i] for i in work)
        if more_seconds > 0:
            return more_flops / more_seconds
        return sum(many[i] for i in work) / max(sum(longer[i] for i in work), 1e-12)

    return Rates(rate(0, 1), rate(2), rate(3))
