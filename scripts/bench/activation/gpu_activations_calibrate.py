"""Measure the inputs of activation policies: the link to host memory, and a layer's time against length.

    .venv/bin/python scripts/bench/activation/gpu_activations_calibrate.py --output cost.json [--json]

The link is measured in each direction alone, in both directions at the same time, and in each direction while matrices
are multiplied. Then one process for each GPU copies at the same time (``--ranks``), which gives
``--link-gb-per-second``. ``--output`` writes a cost file for ``--cost-file``. ``--device cpu --quick`` tests the
script.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.activation.arena import allocate_arena
from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from megatron.bytescale.training.one_device import OneDeviceModel, build_model
from scripts.bench.activation.models import LOSS_TOKENS, SHAPE, TINY
from scripts.bench.activation.shared_link import measure_shared_link
from scripts.bench.gpu import device_name, gpu_parser, median_seconds, parse_on_gpu
from scripts.bench.progress import progress

LENGTHS = (8192, 16384, 32768, 49152, 65536, 98304, 131072)
TINY_LENGTHS = (64, 128, 256)
TINY_BYTES = 1 << 16
HEAD_FLOPS = 650e12
REPEATS = 10


def link_speeds(num_bytes: int, repeats: int, on_cuda: bool) -> dict[str, float]:
    """Return GB/s in each direction: alone, in both at the same time, and while the compute stream multiplies."""
    device = torch.device("cuda" if on_cuda else "cpu")
    arena = allocate_arena(2 * num_bytes, pinned=on_cuda)
    host = arena.memory[:num_bytes], arena.memory[num_bytes : 2 * num_bytes]
    near = tuple(torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    streams = (torch.cuda.Stream(), torch.cuda.Stream()) if on_cuda else (None, None)
    width = 4096 if on_cuda and num_bytes > TINY_BYTES else 64
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)

    def copy(way: int) -> None:
        target, source = (host[0], near[0]) if way == 0 else (near[1], host[1])
        if not on_cuda:
            target.copy_(source)
            return
        with torch.cuda.stream(streams[way]):
            target.copy_(source, non_blocking=True)

    def while_multiplying(way: int) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(400):
            torch.mm(matrix, matrix)
        streams[way].record_event(events[0])
        copy(way)
        streams[way].record_event(events[1])
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    speeds = {
        "to_host": num_bytes / median_seconds(lambda: copy(0), repeats, on_cuda) / 1e9,
        "to_device": num_bytes / median_seconds(lambda: copy(1), repeats, on_cuda) / 1e9,
        "each_of_both": num_bytes / median_seconds(lambda: (copy(0), copy(1)), repeats, on_cuda) / 1e9,
    }
    if on_cuda:
        for name, way in (("to_host_while_multiplying", 0), ("to_device_while_multiplying", 1)):
            speeds[name] = num_bytes / statistics.median(while_multiplying(way) for _ in range(repeats)) / 1e9
    return speeds


def layer_seconds(built: OneDeviceModel, length: int, repeats: int) -> tuple[float, float]:
    """Return the median (forward, backward) seconds of one layer on one sequence."""
    from bytescale_ext.attention.layouts.layout import attention_layout
    from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import document_angles
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    on_cuda = built.device.type == "cuda"
    layer, dtype = built.model.decoder.layers[0], next(built.model.parameters()).dtype
    layout = attention_layout(MicroBatch((Shard(0, ((0, length),), (0,)),)), 0, (length,), length)
    positions = torch.arange(length, device=built.device)
    params = DocumentSeqParams(positions=positions, layout=layout)
    hidden = torch.randn(length, 1, built.model.config.hidden_size, device=built.device, dtype=dtype).requires_grad_()
    angles = document_angles(built.model.rotary_pos_emb, positions)
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs[:] = [layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=params)[0]]

    def both() -> None:
        forward()
        outputs[0].sum().backward()

    forward_seconds = median_seconds(forward, repeats, on_cuda)
    return forward_seconds, median_seconds(both, repeats, on_cuda) - forward_seconds


def fit(lengths: list[int], seconds: list[float]) -> tuple[CostModel, float]:
    """Fit ``a s^2 + b s`` with the least squares of relative errors; return the fit and its largest error."""
    sizes, times = np.array(lengths, dtype=np.float64), np.array(seconds)
    rows = np.stack([sizes**2, sizes], axis=1) / times[:, None]
    (a, b), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    a, b = max(float(a), 1e-18), max(float(b), 1e-15)
    return CostModel(a=a, b=b), float(np.abs((a * sizes**2 + b * sizes) / times - 1).max())


def calibrate(on_cuda: bool, quick: bool, repeats: int, num_processes: int = 1) -> tuple[dict[str, Any], ModelCost]:
    """Return all figures and the cost of the model; ``num_processes`` processes copy at the same time."""
    shape, lengths = (TINY, TINY_LENGTHS) if quick else (SHAPE, LENGTHS)
    shape = replace(shape, num_layers=1)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    num_bytes = TINY_BYTES if quick else (1 << 30)
    shared = measure_shared_link(num_processes, num_bytes, repeats, on_cuda)
    speeds = link_speeds(num_bytes, repeats, on_cuda)
    built = build_model(shape, dtype, 0, loss_tokens=LOSS_TOKENS, on_cpu=not on_cuda)
    times = [layer_seconds(built, length, repeats) for length in progress(lengths, lambda n: f"layer on {n} tokens")]
    (forward, forward_error), (backward, backward_error) = (
        fit(list(lengths), list(column)) for column in zip(*times, strict=True)
    )
    device = device_name("cuda" if on_cuda else "cpu")
    cost = replace(
        cost_of_rates(shape, HEAD_FLOPS, HEAD_FLOPS, HEAD_FLOPS),
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        source="gpu_activations_calibrate.py; the head is not measured: 650 TFLOP/s are assumed",
        forward=forward,
        backward=backward,
    )
    rows = [{"num_tokens": n, "forward_seconds": f, "backward_seconds": b}
            for n, (f, b) in zip(lengths, times, strict=True)]  # fmt: skip
    return {
        "device": device, "link_gb_per_second": speeds, "layer": rows,
        "shared_link": {**asdict(shared), "gpus_per_link": shared.gpus_per_link},
        "largest_fit_error": {"forward": forward_error, "backward": backward_error},
    }, cost  # fmt: skip


def main() -> None:
    """Measure, print, and write the cost file."""
    parser = gpu_parser("Measure the link to host memory and a layer's time against length.")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each measurement (%(default)s)")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes that copy together (one for each GPU)")
    parser.add_argument("--output", type=Path, metavar="F.json", help="write a cost file")
    args = parse_on_gpu(parser)
    on_cuda = args.device == "cuda"
    num_processes = args.ranks or (torch.cuda.device_count() if on_cuda else 1)
    figures, cost = calibrate(on_cuda, args.quick, args.repeats, num_processes)
    for name, speed in figures["link_gb_per_second"].items():
        print(f"{name:28} {speed:8.2f} GB/s")
    shared = figures["shared_link"]
    print(
        f"{num_processes} processes together: {min(shared['together']):.2f} GB/s each; one alone: "
        f"{min(shared['alone']):.2f} GB/s, {shared['gpus_per_link']} share a link; give --link-gb-per-second "
        f"{min(shared['together']):.1f}"
    )
    for row in figures["layer"]:
        forward, backward = (row[f"{way}_seconds"] * 1e3 for way in ("forward", "backward"))
        print(f"{row['num_tokens']:8} tokens  {forward:9.3f} ms {backward:9.3f} ms")
    print(f"largest error of the fit: {figures['largest_fit_error']}")
    if args.output is not None:
        write_cost(args.output, cost)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
