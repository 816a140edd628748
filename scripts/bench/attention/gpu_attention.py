"""Measure ring attention of D virtual ranks, in turn on one device, against one kernel call on the whole sequence.

    .venv/bin/python scripts/bench/attention/gpu_attention.py                 # 32K and 128K tokens, D = 1, 2, 4, 8
    .venv/bin/python scripts/bench/attention/gpu_attention.py --quick --json  # one short length; ends with JSON
    .venv/bin/python scripts/bench/attention/gpu_attention.py --device cpu    # tiny sizes, to test the script

The ranks of a ring do the same work as one kernel call on the whole sequence, cut into D blocks for each rank. *kernel*
is the time inside the attention kernel, summed over ranks, over the time of the whole-sequence call. *total* adds
joining blocks, packing keys, and one copy in device memory for every transfer. No network is measured. Packs of short
documents take the same path and are compared with one varlen call. Times are medians after warm-up. TFLOP/s count the
causal triangle once, and the backward pass as 2.5 times the forward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.kernels.table import Kernel, choose_kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.measure.ring_blocks import backward_in_turn, forward_in_turn, ring_layouts
from bytescale_ext.plan.step.micro_batch import zigzag_ranges
from scripts.bench.gpu import device_name, gpu_parser, parse_on_gpu
from scripts.bench.progress import progress

TARGET_RATIO = 1.10
Tensors = tuple[torch.Tensor, ...]
Mark = torch.cuda.Event | float


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurement; ``lengths``, ``pack_tokens`` and ``check_tokens`` are in tokens."""

    device: torch.device
    dtype: torch.dtype
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    pack_tokens: int
    check_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    repeats: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def values(self, num_tokens: int) -> Tensors:
        """Return random ``q, k, v, dout``: ``[num_tokens, heads or kv_heads, head_dim]``."""
        generator = torch.Generator(self.device).manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        device, dtype = self.device, self.dtype
        return tuple(
            torch.randn(num_tokens, count, self.head_dim, generator=generator, device=device, dtype=dtype)
            for count in heads
        )

    def tera_flops(self, lengths: Sequence[int], backward: bool) -> float:
        """Return the TFLOPs of causal attention: two matrix products forward, five backward."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return 4 * self.heads * self.head_dim * pairs * (3.5 if backward else 1.0) / 1e12


@dataclass(frozen=True)
class Row:
    """One measurement; ``width`` 0 means a pack of local documents."""

    direction: str
    num_tokens: int
    width: int
    one_kernel_ms: float
    kernel_ms: float
    total_ms: float
    teraflops_per_second: float

    @property
    def kernel_ratio(self) -> float:
        return self.kernel_ms / self.one_kernel_ms

    @property
    def total_ratio(self) -> float:
        return self.total_ms / self.one_kernel_ms


class Clock:
    """Sums the time inside the calls that it runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Mark, Mark]] = []

    def run[Result](self, function: Callable[[], Result]) -> Result:
        """Call a function and add its time."""
        start = self._mark()
        result = function()
        self._marks.append((start, self._mark()))
        return result

    def timed(self, kernel: Kernel) -> Kernel:
        """Return the kernel with timed calls."""

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
            return self.run(lambda: kernel.forward(q, k, v, block))

        def backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
            return self.run(lambda: kernel.backward(dout, saved, block))

        return dataclasses.replace(kernel, forward=forward, backward=backward)

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read_ms(self) -> float:
        """Return the milliseconds since the last reading."""
        marks, self._marks = self._marks, []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return sum(map(_milliseconds, marks))


def _milliseconds(marks: tuple[Mark, Mark]) -> float:
    start, stop = marks
    if isinstance(start, float) and isinstance(stop, float):
        return (stop - start) * 1e3
    assert isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event), f"{start=} {stop=}"
    return float(start.elapsed_time(stop))


def median_ms(run: Callable[[], object], settings: Settings, clock: Clock | None = None) -> tuple[float, float]:
    """Return the median milliseconds of ``run``, and of the time that ``clock`` counts inside it."""
    outer = Clock(settings.device)
    totals, inside = [], []
    for repeat in range(settings.repeats + 2):
        outer.run(run)
        total = outer.read_ms()
        kernel = clock.read_ms() if clock else total
        # The first two runs warm up compilation, the allocator and the clocks.
        if repeat >= 2:
            totals.append(total)
            inside.append(kernel)
    return statistics.median(totals), statistics.median(inside)


def shares(values: Tensors, length: int, width: int) -> list[Tensors]:
    """Return the rows of ``values``, each ``[length, heads, dim]``, that each ring member holds."""
    parts = [zigzag_ranges(length, width, index) for index in range(width)]
    return [tuple(torch.cat([x[a:b] for a, b in ranges]) for x in values) for ranges in parts]


def run_ranks_in_turn(
    layouts: Sequence[AttentionLayout], inputs: Sequence[Tensors], kernel: Kernel, scale: float, backward: bool
) -> list[Tensors]:
    """Return ``out`` of each virtual rank, and with ``backward`` also ``dq, dk, dv``.

    ``inputs`` holds ``q, k, v, dout`` of each rank, ``[rows, heads or kv_heads, dim]``; results have the same shapes.
    """
    outputs = forward_in_turn(layouts, inputs, kernel, scale)
    if not backward:
        return [(out,) for out, _ in outputs]
    grads = backward_in_turn(layouts, inputs, outputs, kernel, scale)
    return [(out, *grad) for (out, _), grad in zip(outputs, grads, strict=True)]


def run_one_kernel(values: Tensors, block: AttentionBlock, kernel: Kernel, backward: bool) -> Tensors:
    """Run the whole sequence, or all documents of a pack, in one call of the kernel; return ``out`` (and gradients).

    ``values`` holds ``q, k, v, dout``, each ``[t, heads or kv_heads, dim]``.
    """
    q, k, v, dout = values
    out, lse = kernel.forward(q, k, v, block)
    return (out, *kernel.backward(dout, Saved(q, k, v, out, lse), block)) if backward else (out,)


def measure(settings: Settings, kernel: Kernel) -> list[Row]:
    """Measure every length on every ring, then a pack of short documents."""
    pack = pack_lengths(settings.pack_tokens)
    parts = [
        (f"{length} tokens", [length], {width: ring_layouts([length], width) for width in settings.widths})
        for length in settings.lengths
    ]
    parts.append(("pack of documents", pack, {0: ring_layouts(pack, 1)}))
    return [
        row
        for _, lengths, layouts in progress(parts, lambda part: part[0])
        for row in _measure_against_one(settings, kernel, CuSeqlens.of_lengths(lengths), layouts)
    ]


def _measure_against_one(
    settings: Settings, kernel: Kernel, documents: CuSeqlens, layouts: dict[int, list[AttentionLayout]]
) -> list[Row]:
    """Return a row for each direction and each layout."""
    rows, values = [], settings.values(documents.num_tokens)
    block = AttentionBlock(documents, documents, causal=True, scale=settings.scale)
    for backward in (False, True):
        one_kernel, _ = median_ms(partial(run_one_kernel, values, block, kernel, backward), settings)
        for width, ranks in layouts.items():
            inputs = shares(values, documents.num_tokens, max(width, 1))
            clock = Clock(settings.device)
            run = partial(run_ranks_in_turn, ranks, inputs, clock.timed(kernel), settings.scale, backward)
            total, inside = median_ms(run, settings, clock)
            rate = settings.tera_flops(documents.lengths, backward) / (total / 1e3)
            direction = "forward+backward" if backward else "forward"
            rows.append(Row(direction, documents.num_tokens, width, one_kernel, inside, total, rate))
    return rows


def pack_lengths(num_tokens: int) -> list[int]:
    """Return the lengths of many short and few long documents that fill ``num_tokens``; none is above an eighth."""
    pattern = [num_tokens // part for part in (8, 16, 64, 64, 128, 256, 256, 512)]
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        room = num_tokens - sum(lengths)
        lengths.append(min(room, max(1, pattern[len(lengths) % len(pattern)])))
    return lengths


def errors(settings: Settings, kernel: Kernel) -> dict[int, dict[str, float]]:
    """Return the relative error against the float32 reference, by ring width and tensor."""
    length = settings.check_tokens
    values = settings.values(length)
    q, k, v, dout = (x.float() for x in values)
    documents = CuSeqlens((0, length))
    block = AttentionBlock(documents, documents, causal=True, scale=settings.scale)
    out, lse = reference_forward(q, k, v, block)
    reference = (out, *reference_backward(dout, Saved(q, k, v, out, lse), block))
    by_width = {}
    for width in settings.widths:
        inputs = shares(values, length, width)
        results = run_ranks_in_turn(ring_layouts([length], width), inputs, kernel, settings.scale, True)
        expected = shares(reference, length, width)
        by_width[width] = {
            name: max(float((a[i].float() - b[i]).abs().max()) for a, b in zip(results, expected, strict=True))
            / float(reference[i].abs().max())
            for i, name in enumerate(("out", "dq", "dk", "dv"))
        }
    return by_width


def table(settings: Settings, rows: Sequence[Row], by_width: dict[int, dict[str, float]]) -> str:
    """Return the results as a table; ``by_width`` holds the errors."""
    lines = [f"{'':18}{'tokens':>8}{'ranks':>7}{'one ms':>10}{'total ms':>10}{'TFLOP/s':>9}{'kernel':>8}{'total':>7}"]
    for row in rows:
        ranks = str(row.width) if row.width else "pack"
        mark = " *" if row.kernel_ratio > TARGET_RATIO else ""
        lines.append(
            f"{row.direction:18}{row.num_tokens:8}{ranks:>7}{row.one_kernel_ms:10.3f}{row.total_ms:10.3f}"
            f"{row.teraflops_per_second:9.2f}{row.kernel_ratio:8.3f}{row.total_ratio:7.3f}{mark}"
        )
    lines.append(
        f"kernel, total: ratios to one kernel call; * marks a kernel ratio above the target of {TARGET_RATIO:.2f}"
    )
    lines.append(f"relative error against float32 at {settings.check_tokens} tokens:")
    for width, by_name in by_width.items():
        lines.append(f"  {width} ranks: " + ", ".join(f"{name} {error:.1e}" for name, error in by_name.items()))
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Return the command line and the sizes that it asks for."""
    parser = gpu_parser(str(__doc__).splitlines()[0])
    parser.add_argument("--kernel", help="kernel of the table to measure (the fastest that runs)")
    options = parse_on_gpu(parser, arguments)
    device = torch.device(options.device)
    on_cuda, widths = device.type == "cuda", (1, 2, 4, 8)
    if on_cuda and not options.quick:
        return options, Settings(device, torch.bfloat16, (32768, 131072), widths, 32768, 4096, 32, 8, 128, 10)
    lengths, repeats = ((192,), 1) if options.quick else ((512, 2048), 5)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    return options, Settings(device, dtype, lengths, widths, lengths[0], 128, 4, 2, 64, repeats)


def main(arguments: Sequence[str]) -> None:
    """Measure and print the results."""
    options, settings = parse(arguments)
    kernel, reason, considered = choose_kernel(settings.device, settings.dtype, settings.head_dim, options.kernel)
    on_gpu = settings.device.type == "cuda"
    name = device_name("cuda") if on_gpu else "CPU (tiny sizes, which say nothing about GPUs)"
    print(f"{name}, torch {torch.__version__}, {settings.dtype}, {settings.heads} heads, {settings.kv_heads} kv heads,")
    print(f"head dim {settings.head_dim}; kernel {kernel.name}: {reason}")
    for other, reason_against in considered:
        print(f"  not {other}: {reason_against}")
    by_width = errors(settings, kernel)
    rows = measure(settings, kernel)
    print(table(settings, rows, by_width))
    if options.json:
        results = [
            {**dataclasses.asdict(row), "kernel_ratio": row.kernel_ratio, "total_ratio": row.total_ratio}
            for row in rows
        ]
        print(json.dumps({"device": name, "kernel": kernel.name, "rows": results, "relative_errors": by_width}))


if __name__ == "__main__":
    main(sys.argv[1:])
