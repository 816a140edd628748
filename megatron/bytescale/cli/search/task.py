"""The task of ``bytescale search``: the model of its flags with its costs, the cluster, and steps of documents."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final

from bytescale_ext.measure.cost_file import check_same_model, read_cost
from bytescale_ext.measure.devices import DEFAULT_DEVICE, device_cost, scaled_device_cost
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from bytescale_ext.plan.search.explore import in_sizes
from bytescale_ext.plan.search.task import Devices, Task
from megatron.bytescale.cli.shared.lengths import draw_pieces, read_lengths
from megatron.bytescale.cli.shared.model_flags import given_flags, model_of, with_needed, words_of

DOCUMENTS_OF_A_RANK: Final = 8
"""The most documents of a step for each rank, if their number is not given."""


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the task of the options for each size of steps, ascending.

    The size is given, or sizes are tried: powers of two for each rank, up to the largest, with the same documents.
    Raises ValueError like ``task_of``.
    """
    if args.global_batch_size is not None:
        return [task_of(args)]
    per_rank = args.largest_batch_size // args.ranks if args.largest_batch_size else DOCUMENTS_OF_A_RANK
    sizes = [args.ranks << power for power in range(per_rank.bit_length())]
    return in_sizes(task_of(args, sizes[-1]), sizes)


def task_of(args: argparse.Namespace, batch: int | None = None) -> Task:
    """Return the task of the options, with steps of ``batch`` documents (default: ``--global-batch-size``).

    Raises:
        ValueError: flags that Megatron refuses, a cost file of another model, a bad file, or too few documents.
    """
    device = args.device or DEFAULT_DEVICE
    given = read_cost(args.cost_file) if args.cost_file is not None else device_cost(device)
    words = launched_words(args.model_flags, given.dtype)
    model = model_of(words, on_cuda=given.on_cuda and "--cpu" not in words)
    if args.cost_file is not None:
        cost = check_same_model(given, model.shape, given.tensor_parallel, model.dtype, args.cost_file)
    else:
        cost = scaled_device_cost(model.shape, 1, model.dtype, name=device)
    if args.slowdown is not None:
        cost = replace(cost, slowdown=args.slowdown)
    memory = args.device_memory_gb * 1e9, args.host_memory_gb * 1e9
    devices = Devices(args.ranks, min(args.ranks, args.ranks_per_node), *memory, speeds=args.speeds or ())
    steps = draw_steps(args, batch or args.global_batch_size)
    traits = model.operators, model.rows_multiple, model.ties_embeddings, model.state_sizes
    return Task(cost, devices, args.seq_length, steps, *traits)


def launched_words(flags: str, dtype: str) -> list[str]:
    """Return the flags of the model in the script: the user's, flags that hybrid data parallelism needs, and a type.

    ``dtype`` is the type of the parameters in the costs; a type among the flags takes precedence. Raises ValueError if
    the flags cannot be split.
    """
    words = with_needed(words_of(flags))
    return [*words, "--bf16"] if dtype == "bfloat16" and not given_flags(words) & {"--bf16", "--fp16"} else words


def draw_steps(args: argparse.Namespace, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the ``number`` documents of each step. Raises ValueError for a bad file."""
    seeds = range(args.steps)
    if args.sampler is not None:
        return tuple(sample_documents(args.sampler, args.seq_length, number, seed) for seed in seeds)
    lengths = read_lengths(args.lengths)
    return tuple(tuple(draw_pieces(lengths, args.seq_length, number, seed)) for seed in seeds)
