"""``bytescale profile``: measure a model on this device and write its cost file."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.errors import one_line
from bytescale_ext.measure.fit import (
    LAYERS,
    Origin,
    Prediction,
    errors_text,
    fit_rings,
    fit_timings,
    fitted_lengths,
    fitted_rings,
    model_cost,
    predict,
    prediction_table,
    unseen_lengths,
    unseen_rings,
    virtual_rings,
    with_blocks,
)
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import ModelCost
from megatron.bytescale.cli.shared.inputs import check_writable, count, size
from megatron.bytescale.cli.shared.options import add_cpu, add_json

if TYPE_CHECKING:
    from megatron.bytescale.training.profile import Subject

NAME = "profile"
HELP = "measure the layers of a model on this GPU or CPU and write a cost file"
EXAMPLE = (
    "bytescale profile --output runs/cost.json -- $TRAINING_FLAGS; with N ranks, to measure whole rings: "
    "torchrun --nproc-per-node N --no-python bytescale profile --output runs/cost.json -- $TRAINING_FLAGS"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale profile``."""
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="write the cost file (replaced)")
    parser.add_argument(
        "--max-tokens",
        type=size,
        metavar="N",
        help="longest micro-batch to measure, which must fit in memory (32768 on a GPU, 4096 on CPU)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=5,
        metavar="N",
        help="runs of each micro-batch, for the median (%(default)s)",
    )
    parser.add_argument(
        "--ring-bytes-per-second",
        type=float,
        metavar="B",
        help="rate at which a rank receives from another; default: measured between two GPUs or two CPU processes, or "
        "with a single GPU the rate of copies to host memory",
    )
    parser.add_argument(
        "--node-bytes-per-second",
        type=float,
        metavar="B",
        help="rate at which a rank receives from another node; default: measured if torchrun starts several nodes, "
        "else --ring-bytes-per-second",
    )
    add_cpu(parser)
    add_json(parser)
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of the training command, after a --; flags that do not change the time of a layer are ignored, "
        "such as flags of data, checkpoints and pipeline stages",
    )


def run(args: argparse.Namespace) -> int:
    """Measure a model, fit and write its cost file, and print the errors of its predictions.

    Raises:
        ValueError: a flag that cannot be profiled, noisy times, or an output that cannot be written.
    """
    _check(args)
    from megatron.bytescale import cpu

    on_cpu = cpu.install_if_wanted(["--cpu"] if args.cpu else args.flags) is not None
    begun = time.perf_counter()
    import torch

    try:
        with quiet():
            cost, predictions, rank = profile_model(args, on_cpu)
    except torch.OutOfMemoryError:
        raise ValueError("a micro-batch does not fit in the GPU's memory; give a smaller --max-tokens") from None
    if rank:  # with torchrun, only the first process writes and prints
        return 0
    from bytescale_ext.measure.cost_file import write_cost

    write_cost(args.output, cost)
    if args.json:
        print(
            json.dumps(
                {"cost": cost.to_json(), "unseen": [_as_json(prediction) for prediction in predictions]}, indent=2
            )
        )
        return 0
    print(report_text(cost, predictions))
    print(f"wrote {one_line(args.output)} after {time.perf_counter() - begun:.0f} s")
    return 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide Megatron's lists of arguments (standard output) and parameters (log)."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def profile_model(args: argparse.Namespace, on_cpu: bool) -> tuple[ModelCost, list[Prediction], int]:
    """Return (costs, predictions of held-out lengths, rank of the process)."""
    # Megatron takes seconds to import, so --help and errors come first.
    import torch

    from megatron.bytescale.training.profile import prepare

    max_tokens = (4096 if on_cpu else 32768) if args.max_tokens is None else args.max_tokens
    subject = prepare([*args.flags, *(["--cpu"] if args.cpu else [])], max_tokens, on_cpu)
    rates = args.ring_bytes_per_second, args.node_bytes_per_second
    cost, predictions = measure_costs(subject, max_tokens, args.repeats, rates)
    torch.distributed.destroy_process_group()
    return cost, predictions, int(subject.args.rank)


def measure_costs(
    subject: Subject, max_tokens: int, repeats: int, given_rates: tuple[float | None, float | None] = (None, None)
) -> tuple[ModelCost, list[Prediction]]:
    """Measure a model with micro-batches of up to ``max_tokens``; return its costs and predictions of held-out lengths.

    Collective over all processes. The costs are equal on all processes, except the speed of a ring with one HDP rank of
    several tensor-parallel ranks, which only the first process measures.

    Args:
        subject: model to measure.
        max_tokens: tokens of the longest micro-batch.
        repeats: runs of each micro-batch.
        given_rates: bytes per second inside a node and between nodes; None: measure them.
    """
    import torch

    from megatron.bytescale.training.profile import kept_bytes_per_token, time_blocks, time_packs

    num_ranks = subject.cluster.num_ranks
    fitted, unseen = fitted_lengths(max_tokens), unseen_lengths(max_tokens)
    ring_fitted, ring_unseen = fitted_rings(max_tokens, num_ranks), unseen_rings(max_tokens, num_ranks)
    timings = time_packs(subject, [*fitted, *unseen], repeats, [*ring_fitted, *ring_unseen])
    fitted_timings = [timing for timing in timings if timing.width == 1 and timing.lengths in fitted]
    rings = [timing for timing in timings if (timing.lengths, timing.width) in ring_fitted]
    others = [timing for timing in timings if timing not in fitted_timings and timing not in rings]
    rate, between, origin_of_rate = link_rates(given_rates, subject)
    crosses = num_ranks > subject.cluster.node_ranks
    exchange = subject.ring_seconds(between if crosses else rate)
    on_one_rank = fit_timings(fitted_timings)
    measured = f"{len(fitted_timings)} micro-batches{f' and {len(rings)} rings' if rings else ''}"
    if num_ranks == 1 and subject.shape.latent is None:  # blocks of latents also expand them
        blocks = virtual_rings(max_tokens)
        rings = with_blocks(on_one_rank, blocks, time_blocks(subject, blocks))
        measured += f" and the blocks of {len(rings)} rings on one rank"
    has_waits = num_ranks > 1 and not subject.has_processor_time
    fits = fit_rings(on_one_rank, rings, exchange, has_waits=has_waits)
    predictions = predict(fits, others)
    recompute = subject.args.recompute_granularity
    assert subject.runtime.parts.kernel is not None
    source = (
        f"bytescale profile, torch {torch.__version__}, attention kernel {subject.runtime.parts.kernel.name}: "
        f"{measured} of up to {max_tokens} tokens in models "
        f"of {LAYERS[0]} and {LAYERS[1]} layers{f', with {recompute} recompute' if recompute else ''}; "
        f"other lengths predicted with an error of {errors_text(predictions)}; "
        f"ring {origin_of_rate}, {rate / 1e9:.3g} GB/s"
        f"{f', between nodes {between / 1e9:.3g} GB/s' if between < rate else ''}"
    )
    kept = kept_bytes_per_token(subject, max_tokens // 4)
    origin = Origin(subject.shape, subject.device, subject.dtype, subject.tensor_parallel, source)
    cost, inside = model_cost(fits, kept, origin), subject.ring_seconds(rate)
    forward, backward = (replace(part, c=c) for part, c in zip((cost.forward, cost.backward), inside, strict=True))
    cost = replace(cost, forward=forward, backward=backward, slowdown=max(1.0, rate / between))
    collective, latency = collective_seconds(subject)
    return replace(cost, collective=collective, latency=latency), predictions


def link_rates(given: tuple[float | None, float | None], subject: Subject) -> tuple[float, float, str]:
    """Return bytes per second inside a node and between nodes, and their origin. Collective over HDP ranks."""
    from bytescale_ext.measure import ring_speed

    comm, node = subject.runtime.parts.comm, subject.cluster.node_ranks
    if given[0] is None and comm is not None and 1 < node < comm.size and comm.size % node == 0:
        rate, between = ring_speed.bytes_per_second_of_nodes(comm, node, subject.runtime.device)
        origin = f"measured by {comm.size} ranks on nodes of {node}"
    else:
        rate, origin = ring_rate(given[0], subject)
        between = rate
    return rate, given[1] or between, origin


def collective_seconds(subject: Subject) -> tuple[float, float]:
    """Return the seconds per received byte of a collective, and its latency in seconds. Collective.

    The ranks are a tensor-parallel group or, without tensor parallelism, a node. Both are 0 for a single rank.
    """
    import torch
    from megatron.core import parallel_state

    from bytescale_ext.measure import ring_speed

    device, node = subject.runtime.device, subject.cluster.node_ranks
    if subject.tensor_parallel > 1:
        group = parallel_state.get_tensor_model_parallel_group()
    elif node > 1 and subject.cluster.num_ranks % node == 0:
        group, _ = torch.distributed.new_subgroups(node)
    else:
        return 0.0, 0.0
    return ring_speed.collective_seconds_per_byte(group, device), ring_speed.collective_latency(group, device)


def ring_rate(given: float | None, subject: Subject) -> tuple[float, str]:
    """Return bytes per second between ranks of a ring, and their origin. Collective over several HDP ranks."""
    import torch

    from bytescale_ext.measure import ring_speed

    comm, on_cpu = subject.runtime.parts.comm, not subject.runtime.parts.clock.on_cuda
    if given is not None:
        return given, "as given with --ring-bytes-per-second"
    if comm is not None and comm.size > 1:
        return ring_speed.exchanged_bytes_per_second(comm, subject.runtime.device), f"measured by {comm.size} ranks"
    if int(subject.args.rank):
        return 1.0, "measured by the first process"
    if on_cpu or torch.cuda.device_count() > 1:
        where = "processes on CPU" if on_cpu else "GPUs of this machine"
        return ring_speed.bytes_per_second_of_two_processes(not on_cpu), f"measured between two {where}"
    return ring_speed.host_copy_bytes_per_second(), "taken from copies to host memory, as there is one GPU"


def report_text(cost: ModelCost, predictions: Sequence[Prediction]) -> str:
    """Return the costs and their errors as text."""
    rows = [
        ("attention, ps per token squared", "a", 1e12),
        ("linear, ns per token", "b", 1e9),
        ("ring, ns per token received", "c", 1e9),
        ("ring, ns of work per token received", "h", 1e9),
        ("ring, us of work per block", "m", 1e6),
        ("fixed, us per micro-batch", "g", 1e6),
    ]
    lines = [f"{cost.device}, {cost.dtype}", "", f"{'one layer':<34} {'forward':>12} {'backward':>12}"]
    for name, key, unit in rows:
        lines.append(f"  {name:<32} {_number(cost.forward, key, unit)} {_number(cost.backward, key, unit)}")
    head = (1e9 * cost.head_forward, 1e9 * cost.head_backward)
    lines.append(f"{'embedding, output layer and loss':<34}")
    lines.append(f"  {'ns per token':<32} {head[0]:12,.2f} {head[1]:12,.2f}")
    if cost.collective:
        lines.append(f"{'collectives in a node':<34} {'':>12} {1e-9 / cost.collective:12,.1f} GB/s received")
        lines.append(f"  {'us for a few bytes':<32} {'':>12} {1e6 * cost.latency:12,.1f}")
    lines.append(f"{'kept until the backward pass':<34} {'':>12} {'recompute':>12}")
    lines.append(f"  {'bytes per token and layer':<32} {cost.layer_bytes:12,.0f} {cost.recompute_bytes:12,.0f}")
    lines += ["", "held-out micro-batches, forward and backward:", prediction_table(predictions)]
    lines.append(f"error: {errors_text(predictions)}")
    lines += ["", cost.source]
    return "\n".join(lines)


def _number(cost: CostModel, key: str, unit: float) -> str:
    return f"{unit * getattr(cost, key):12,.2f}"


def _as_json(prediction: Prediction) -> dict[str, object]:
    return {
        "num_layers": prediction.num_layers,
        "lengths": list(prediction.lengths),
        "measured_seconds": prediction.measured_seconds,
        "predicted_seconds": prediction.predicted_seconds,
        "error": prediction.error,
    }


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for bad options, before any set-up."""
    if not args.flags:
        raise ValueError("no model: give the flags of the training command after a --")
    for flag in ("ring", "node"):
        rate = getattr(args, f"{flag}_bytes_per_second")
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError(f"--{flag}-bytes-per-second {rate:g}: give a positive number")
    if args.max_tokens is not None:
        fitted_lengths(args.max_tokens)
    check_writable("--output", args.output)
