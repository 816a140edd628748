"""The task of ``bytescale search``: the model of its flags with its costs, the cluster, and steps of documents."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final

from bytescale_ext.measure.cost_file import check_same_model, read_cost, shipped
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from bytescale_ext.plan.search.costs import scaled_cost
from bytescale_ext.plan.search.explore import in_sizes
from bytescale_ext.plan.search.task import Devices, Task
from megatron.bytescale.cli.plan import draw_pieces, read_lengths
from megatron.bytescale.cli.shared.model_flags import given_flags, model_of, with_needed, words_of

DEVICES: Final = {"h100": "h100_7b"}
"""Devices whose published timings are shipped, as the costs of a model from which those of others follow."""

DOCUMENTS_OF_A_DEVICE: Final = 8
"""The most documents of a step for each device, where their number is left open."""


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the task of the options in each size of steps, ascending: the given one, or those that are tried.

    They are powers of two for each device, up to the largest, and have the same documents. Raises ValueError as
    ``task_of``.
    """
    if args.global_batch_size is not None:
        return [task_of(args)]
    of_device = args.largest_batch_size // args.gpus if args.largest_batch_size else DOCUMENTS_OF_A_DEVICE
    sizes = [args.gpus << power for power in range(of_device.bit_length())]
    return in_sizes(task_of(args, sizes[-1]), sizes)


def task_of(args: argparse.Namespace, batch: int | None = None) -> Task:
    """Return the task of the options, with steps of ``batch`` documents or the given ones.

    Raises:
        ValueError: flags that Megatron refuses, another model, a bad file, or too few documents.
    """
    given = read_cost(args.cost_file) if args.cost_file is not None else shipped(DEVICES[args.device])
    words = launched_words(args.model_flags, given.dtype)
    model = model_of(words, on_cuda=given.on_cuda and "--cpu" not in words)
    if args.cost_file is not None:
        cost = check_same_model(given, model.shape, given.tensor_parallel, model.dtype, args.cost_file)
    else:
        cost = replace(scaled_cost(given, model.shape, 1), dtype=model.dtype)
    if args.slowdown is not None:
        cost = replace(cost, slowdown=args.slowdown)
    devices = Devices(
        args.gpus, min(args.gpus, args.gpus_per_node), args.device_memory_gb * 1e9, args.host_memory_gb * 1e9
    )
    steps = draw_steps(args, batch or args.global_batch_size)
    return Task(cost, devices, args.context, steps, model.operators, model.rows_multiple, model.ties_embeddings)


def launched_words(flags: str, dtype: str) -> list[str]:
    """Return the flags of the model that the script has: the user's, what hybrid data parallelism needs, ``dtype``.

    ``dtype``: of the parameters that the costs are of; flags of another one stand. Raises ValueError.
    """
    words = with_needed(words_of(flags))
    return [*words, "--bf16"] if dtype == "bfloat16" and not given_flags(words) & {"--bf16", "--fp16"} else words


def draw_steps(args: argparse.Namespace, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the documents of each step, ``number`` of them. Raises ValueError for a bad file."""
    seeds = range(args.steps)
    if args.sampler is not None:
        return tuple(sample_documents(args.sampler, args.context, number, seed) for seed in seeds)
    lengths = read_lengths(args.lengths)
    return tuple(tuple(draw_pieces(lengths, args.context, number, seed)) for seed in seeds)
