"""Ring attention of D virtual ranks, run in turn on one device, against one kernel call over the whole sequence.

    python scripts/bench/gpu_attention.py                 # one GPU, 32K and 128K tokens, D = 1, 2, 4, 8, bf16
    python scripts/bench/gpu_attention.py --quick --json  # smaller, and one JSON line at the end
    python scripts/bench/gpu_attention.py --device cpu    # tiny sizes: shows that it runs, nothing about speed

The ranks of a ring do the same work as one kernel over the whole sequence, cut in 2D - 1 rectangles and triangles
a rank. "kernel ratio" is the time inside the attention kernel, all ranks together, over that of the whole-sequence
call; "total ratio" adds joining the blocks, packing keys, and one copy in device memory for every transfer. No
network is measured. Packs of short documents are measured through the same path, against one varlen call.
Times are medians after warm-up; TFLOP/s count the causal triangle once (backward: 2.5 times the forward).
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
from typing import Any

import torch

from bytescale_ext.attention.kernels import Kernel, choose_kernel
from bytescale_ext.attention.layout import AttentionLayout, ring_pass
from bytescale_ext.attention.ring import RingContext, backward_steps, forward_steps
from bytescale_ext.attention.rows import CuSeqlens, Rows
from bytescale_ext.attention.torch_kernels import reference_documents_backward, reference_documents_forward
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from bytescale_ext.plan.shapes import zigzag_ranges

TARGET_RATIO = 1.10
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Settings:
    """What is measured. ``lengths`` and ``pack_tokens`` in tokens."""

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
        """``q, k, v, dout`` of random numbers."""
        generator = torch.Generator(self.device).manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        options: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": self.dtype}
        return tuple(torch.randn(num_tokens, count, self.head_dim, **options) for count in heads)

    def tera_flops(self, lengths: Sequence[int], backward: bool) -> float:
        """Floating point operations / 1e12 of causal attention (two matrix products forward, five backward)."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return 4 * self.heads * self.head_dim * pairs * (3.5 if backward else 1.0) / 1e12


@dataclass(frozen=True)
class Row:
    """One measurement. ``width`` 0 is a pack of local documents."""

    what: str
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


class KernelClock:
    """Time spent inside a kernel: ``timed`` is the kernel with a clock around each call."""

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []
        self.timed = dataclasses.replace(
            kernel, forward=self._around(kernel.forward), backward=self._around(kernel.backward)
        )

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = self._mark()
            result = function(*arguments)
            self._marks.append((start, self._mark()))
            return result

        return call

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read_ms(self) -> float:
        """Milliseconds since the last reading."""
        marks, self._marks = self._marks, []
        if self._device.type != "cuda":
            return sum(stop - start for start, stop in marks) * 1e3
        torch.cuda.synchronize(self._device)
        return float(sum(start.elapsed_time(stop) for start, stop in marks))


def median_ms(run: Callable[[], Any], settings: Settings, clock: KernelClock | None = None) -> tuple[float, float]:
    """Medians of the whole time of ``run`` and of the time inside ``clock``'s kernel, in milliseconds."""
    outer = KernelClock(dataclasses.replace(_no_kernel(), forward=lambda: run()), settings.device)
    totals, inside = [], []
    for repeat in range(settings.repeats + 2):
        outer.timed.forward()  # type: ignore[call-arg]
        total = outer.read_ms()
        kernel = clock.read_ms() if clock else total
        # The first two warm up: compilation, allocator, clocks.
        if repeat >= 2:
            totals.append(total)
            inside.append(kernel)
    return statistics.median(totals), statistics.median(inside)


def _no_kernel() -> Kernel:
    def nothing(*_: Any) -> Any:
        return None

    return Kernel("none", (), (), nothing, nothing, nothing)


def ring_layouts(length: int, width: int) -> list[AttentionLayout]:
    """One sequence on a ring of ``width`` ranks (a local document when it is 1)."""
    if width == 1:
        return [pack_layout([length])]
    members = [ring_pass([length], range(width), index) for index in range(width)]
    return [AttentionLayout(m.num_rows, (m,), m.num_rows, CuSeqlens((0,)), Rows(())) for m in members]


def pack_layout(lengths: Sequence[int]) -> AttentionLayout:
    """Local documents end to end."""
    documents = CuSeqlens.of_lengths(lengths)
    return AttentionLayout(documents.num_tokens, (), 0, documents, Rows.of([(0, documents.num_tokens)]))


def shares(values: Tensors, length: int, width: int) -> list[Tensors]:
    """The rows of each ring member."""
    parts = [zigzag_ranges(length, width, index) for index in range(width)]
    return [tuple(torch.cat([x[a:b] for a, b in ranges]) for x in values) for ranges in parts]


def run_ranks_in_turn(
    layouts: Sequence[AttentionLayout], inputs: Sequence[Tensors], kernel: Kernel, scale: float, backward: bool
) -> list[Tensors]:
    """``out`` of each virtual rank, and ``dq, dk, dv`` with ``backward``."""
    comms = mailbox_comms(len(layouts))
    rings = [RingContext(layout, comm, kernel, scale) for layout, comm in zip(layouts, comms, strict=True)]
    ranks = list(zip(inputs, rings, strict=True))
    outputs = run_in_turn([forward_steps(q, k, v, ring) for (q, k, v, _), ring in ranks])
    if not backward:
        return [(out,) for out, _ in outputs]
    grads = run_in_turn(
        [
            backward_steps(dout, q, k, v, out, lse, ring)
            for ((q, k, v, dout), ring), (out, lse) in zip(ranks, outputs, strict=True)
        ]
    )
    return [(out, *grad) for (out, _), grad in zip(outputs, grads, strict=True)]


def run_one_kernel(values: Tensors, documents: CuSeqlens, kernel: Kernel, scale: float, backward: bool) -> Tensors:
    """The whole sequence, or all documents of a pack, in one call of the kernel."""
    q, k, v, dout = values
    out, lse = kernel.forward(q, k, v, documents, documents, True, scale)
    if not backward:
        return (out,)
    return (out, *kernel.backward(dout, q, k, v, out, lse, documents, documents, True, scale))


def measure(settings: Settings, kernel: Kernel) -> list[Row]:
    """Every length on every ring, then a pack of short documents."""
    rows = []
    for length in settings.lengths:
        values = settings.values(length)
        layouts = {width: ring_layouts(length, width) for width in settings.widths}
        rows += _measure_against_one(settings, kernel, values, CuSeqlens((0, length)), layouts)
    lengths = pack_lengths(settings.pack_tokens)
    values = settings.values(settings.pack_tokens)
    rows += _measure_against_one(settings, kernel, values, CuSeqlens.of_lengths(lengths), {0: [pack_layout(lengths)]})
    return rows


def _measure_against_one(
    settings: Settings,
    kernel: Kernel,
    values: Tensors,
    documents: CuSeqlens,
    layouts: dict[int, list[AttentionLayout]],
) -> list[Row]:
    rows = []
    for backward in (False, True):
        one, _ = median_ms(lambda b=backward: run_one_kernel(values, documents, kernel, settings.scale, b), settings)
        for width, ranks in layouts.items():
            inputs = shares(values, documents.num_tokens, max(width, 1))
            clock = KernelClock(kernel, settings.device)

            def run(ranks=ranks, inputs=inputs, clock=clock, backward=backward) -> Any:  # type: ignore[no-untyped-def]
                return run_ranks_in_turn(ranks, inputs, clock.timed, settings.scale, backward)

            total, inside = median_ms(run, settings, clock)
            work = settings.tera_flops(documents.lengths, backward)
            what = "forward+backward" if backward else "forward"
            rows.append(Row(what, documents.num_tokens, width, one, inside, total, work / (total / 1e3)))
    return rows


def pack_lengths(num_tokens: int) -> list[int]:
    """Document lengths that fill ``num_tokens``: many short, few long, none above an eighth."""
    pattern = [num_tokens // part for part in (8, 16, 64, 64, 128, 256, 256, 512)]
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        room = num_tokens - sum(lengths)
        lengths.append(min(room, max(1, pattern[len(lengths) % len(pattern)])))
    return lengths


def errors(settings: Settings, kernel: Kernel) -> dict[int, dict[str, float]]:
    """Largest difference from the float32 reference, over the largest value, of each tensor and ring width."""
    length = settings.check_tokens
    values = settings.values(length)
    exact = tuple(x.float() for x in values)
    documents = CuSeqlens((0, length))
    block = (documents, documents, True, settings.scale)
    out, lse = reference_documents_forward(*exact[:3], *block)
    wanted = (out, *reference_documents_backward(exact[3], *exact[:3], out, lse, *block))
    found = {}
    for width in settings.widths:
        inputs = shares(values, length, width)
        got = run_ranks_in_turn(ring_layouts(length, width), inputs, kernel, settings.scale, True)
        expected = shares(wanted, length, width)
        found[width] = {
            name: max(float((a[i].float() - b[i]).abs().max()) for a, b in zip(got, expected, strict=True))
            / float(wanted[i].abs().max())
            for i, name in enumerate(("out", "dq", "dk", "dv"))
        }
    return found


def table(settings: Settings, rows: Sequence[Row], found: dict[int, dict[str, float]]) -> str:
    """The results for people."""
    lines = [f"{'':18}{'tokens':>8}{'ranks':>7}{'one ms':>10}{'total ms':>10}{'TFLOP/s':>9}{'kernel':>8}{'total':>7}"]
    for row in rows:
        width = str(row.width) if row.width else "pack"
        mark = " *" if row.kernel_ratio > TARGET_RATIO else ""
        lines.append(
            f"{row.what:18}{row.num_tokens:8}{width:>7}{row.one_kernel_ms:10.3f}{row.total_ms:10.3f}"
            f"{row.teraflops_per_second:9.2f}{row.kernel_ratio:8.3f}{row.total_ratio:7.3f}{mark}"
        )
    lines.append(f"kernel, total: ratios to one kernel call; target of the first <= {TARGET_RATIO:.2f}, * above it")
    lines.append(f"relative error against float32 at {settings.check_tokens} tokens:")
    for width, by_name in found.items():
        lines.append(f"  {width} ranks: " + ", ".join(f"{name} {error:.1e}" for name, error in by_name.items()))
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """The command line."""
    parser = argparse.ArgumentParser(description="ring attention of virtual ranks against one kernel call")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial with tiny sizes")
    parser.add_argument("--kernel", default=None, help="a kernel of the table; the best by default")
    parser.add_argument("--quick", action="store_true", help="one short length, few repeats")
    parser.add_argument("--json", action="store_true", help="a last line with everything as JSON")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu runs tiny sizes")
    if device.type == "cuda":
        lengths, repeats, check = ((8192,), 3, 2048) if options.quick else ((32768, 131072), 10, 4096)
        return options, Settings(device, torch.bfloat16, lengths, (1, 2, 4, 8), lengths[0], check, 32, 8, 128, repeats)
    lengths, repeats = ((192,), 1) if options.quick else ((512, 2048), 5)
    return options, Settings(device, torch.float32, lengths, (1, 2, 4, 8), lengths[0], 128, 4, 2, 64, repeats)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options, settings = parse(arguments)
    kernel, reason, considered = choose_kernel(settings.device, settings.dtype, settings.head_dim, options.kernel)
    on_gpu = settings.device.type == "cuda"
    name = torch.cuda.get_device_name(settings.device) if on_gpu else "CPU (tiny sizes, says nothing about GPUs)"
    print(
        f"{name}, torch {torch.__version__}, {settings.dtype}, {settings.heads} heads, {settings.kv_heads} kv heads, "
    )
    print(f"head dim {settings.head_dim}; kernel {kernel.name}: {reason}")
    for other, why_not in considered:
        print(f"  not {other}: {why_not}")
    found = errors(settings, kernel)
    rows = measure(settings, kernel)
    print(table(settings, rows, found))
    if options.json:
        results = [
            {**dataclasses.asdict(row), "kernel_ratio": row.kernel_ratio, "total_ratio": row.total_ratio}
            for row in rows
        ]
        print(json.dumps({"device": name, "kernel": kernel.name, "rows": results, "relative_errors": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
