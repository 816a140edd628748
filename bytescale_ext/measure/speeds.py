"""Measured speeds for activation plans: copies to host memory, and the computation of one layer. Takes about a second.

The layer consists of the matrix products and the attention of the model's shape, forward and backward. It is timed at
two lengths, so the overhead of kernel launches cancels. The measurement uses its own weights and inputs and leaves the
random state alone, so training is not affected.
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
"""Time after which no measurement is repeated. Each measurement runs at least twice."""

REPEATS: Final = 8
LINK_BYTES: Final = 1 << 26
LENGTHS_ON_CUDA: Final = (2048, 8192)
CPU_FLOPS_PER_PASS: Final = 1e9
"""FLOPs of the products at the longer length on CPU: few enough for a fraction of a second."""

WORK: Final = ("products forward", "products backward", "attention forward", "attention backward")


@dataclass
class Timer:
    """Times repeated work within a time budget.

    Attributes:
        clock: function that returns the time in seconds.
        synchronize: function that waits for the device.
        budget: seconds after which no work is repeated.
    """

    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    budget: float = BUDGET_SECONDS
    _begun: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the timer was created."""
        return self.clock() - self._begun

    def fastest(self, run: Callable[[], object]) -> float:
        """Return the seconds of the fastest run after one for warm-up: other work on the machine only adds time."""
        run()
        fastest = math.inf
        for _ in range(REPEATS):
            self.synchronize()
            begun = self.clock()
            run()
            self.synchronize()
            fastest = min(fastest, self.clock() - begun)
            if self.elapsed > self.budget:
                break
        return fastest


def run_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, including the work that it starts on the device.

    ``Timer`` repeats a run until a deadline, which differs between ranks; collectives need an equal number of runs.
    """
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOP/s of matrix products, attention forward and attention backward."""

    products: float
    attention_forward: float
    attention_backward: float


def copy_seconds_per_byte(host: torch.Tensor, device: torch.device, timer: Timer) -> float:
    """Return the seconds per byte between host memory [n], uint8, and the device, in the slower direction."""
    part = host[:LINK_BYTES]
    on_device = torch.empty(part.shape, dtype=torch.uint8, device=device)
    ways = ((part, on_device), (on_device, part))
    slower = max(timer.fastest(partial(to.copy_, source, non_blocking=True)) for to, source in ways)
    return slower / part.numel()


def product_sizes(shape: ModelShape, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (inputs, outputs) of each matrix product of a dense layer on one tensor-parallel rank."""
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
    """Return the forward FLOPs of one token in the products of ``product_sizes``."""
    return 2.0 * sum(inputs * outputs for inputs, outputs in product_sizes(shape, tensor_parallel))


def measured_lengths(shape: ModelShape, tensor_parallel: int, on_cuda: bool) -> tuple[int, int]:
    """Return the two sequence lengths at which a layer is timed. They are equal on all ranks."""
    if on_cuda:
        return LENGTHS_ON_CUDA
    longer = int(CPU_FLOPS_PER_PASS / product_flops(shape, tensor_parallel))
    longer = min(max(longer, 64), 1024)
    return longer // 4, longer


def kind_seconds(
    shape: ModelShape, tensor_parallel: int, kernel: Kernel, like: torch.Tensor, length: int, timer: Timer
) -> tuple[float, float, float, float]:
    """Return the seconds of each entry of ``WORK`` in one layer, for one sequence.

    ``like``: tensor of any shape, whose type and device are used.
    """
    sizes = product_sizes(shape, tensor_parallel)
    inputs = [_filled(like, length, size).requires_grad_() for size, _ in sizes]
    weights = [_filled(like, outputs, size).requires_grad_() for size, outputs in sizes]
    products: list[torch.Tensor] = []

    def multiply() -> None:
        products[:] = [torch.nn.functional.linear(*pair) for pair in zip(inputs, weights, strict=True)]

    def multiply_back() -> None:
        torch.autograd.grad(products, [*inputs, *weights], gradients, retain_graph=True)

    with torch.enable_grad():
        forward = timer.fastest(multiply)
        gradients = [product.detach() for product in products]
        backward = timer.fastest(multiply_back)
    return forward, backward, *_attention_seconds(shape, tensor_parallel, kernel, like, length, timer)


def _attention_seconds(
    shape: ModelShape, tensor_parallel: int, kernel: Kernel, like: torch.Tensor, length: int, timer: Timer
) -> tuple[float, float]:
    """Return the forward and backward seconds of causal attention of one sequence; ``like``: see ``kind_seconds``."""
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
    """Return a tensor [rows, columns] of varied numbers in [-1, 1), without using the random state."""
    numbers = torch.arange(rows * columns, device=like.device, dtype=torch.float32)
    return (numbers.mul_(0.618034).remainder_(2.0) - 1.0).view(rows, columns).to(like.dtype)


def rates_of(
    shape: ModelShape, tensor_parallel: int, lengths: Sequence[int], seconds: Sequence[Sequence[float]]
) -> Rates:
    """Return the FLOP/s of the work that the longer of two lengths adds to the shorter.

    If noise makes the longer length faster, its own FLOP/s are returned. Causal attention of s tokens takes
    ``2 s^2 head_dim num_heads`` FLOPs forward and 2.5 times as many backward (FlashAttention-2, Dao 2023, section 4.1).

    Args:
        shape: shape of the model.
        tensor_parallel: number of tensor-parallel ranks.
        lengths: shorter and longer length.
        seconds: seconds of each entry of ``WORK``, for each length.
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
