"""N-gram memory (Engram, Cheng et al. 2026): tables of embeddings of the last tokens, added before some layers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.config.memory.ngram import HostTables, NgramConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.samples.grams import GramRule, numbers
from bytescale_ext.measure.host_memory import free_host_bytes
from bytescale_ext.states.cache import POLICIES, CacheSettings
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.memory.activations import local_processes

if TYPE_CHECKING:
    from megatron.bytescale.core.models.common.embeddings.host_memory import HostMemories
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.build import Training

STORAGE: Final = ("device", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of n-gram memory."""
    group = parser.add_argument_group("bytescale: n-gram memory")
    group.add_argument(
        "--ngram-layers",
        type=numbers,
        metavar="N,N",
        help="Give these layers, numbered from 1, a memory of n-grams: hashes of the last tokens of a document name "
        "rows of a table, which are added to the layer's input behind a gate. n-grams never cross documents. Each "
        "layer has its own table. Needs --hybrid-data-parallel. `bytescale ngram` counts the "
        "rows that a data set touches.",
    )
    group.add_argument(
        "--ngram-orders", type=numbers, default=(2, 3), metavar="N,N", help="Lengths of n-grams in tokens (2,3)."
    )
    group.add_argument("--ngram-heads", type=int, default=4, metavar="N", help="Rows of each n-gram (4).")
    group.add_argument("--ngram-rows", type=int, default=1 << 20, metavar="N", help="Rows of each table (1048576).")
    group.add_argument("--ngram-dim", type=int, default=64, metavar="N", help="Numbers of a row (64).")
    group.add_argument(
        "--ngram-storage",
        choices=STORAGE,
        default=STORAGE[0],
        help="Where tables are. device (default): each is a parameter like others, on every rank. host: in host "
        "memory, shared out over the HDP ranks, with row-wise Adagrad beside it, and each rank keeps a cache of rows.",
    )
    _add_host_arguments(group)


def _add_host_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of tables in host memory."""
    group.add_argument(
        "--ngram-cache-rows", type=float, default=0.1, metavar="S", help="Rows in a rank's cache, of all rows (0.1)."
    )
    group.add_argument(
        "--ngram-cache-policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="Which cached row makes room for another: the least recently used (lru, default), the least often used "
        "(lfu), or that but for rows that were used ten times (lfuopt).",
    )
    group.add_argument(
        "--ngram-staleness-read",
        type=int,
        default=0,
        metavar="S",
        help="The most updates that a cached row may lack (0: every read is of the newest row).",
    )
    group.add_argument(
        "--ngram-staleness-write",
        type=int,
        default=0,
        metavar="S",
        help="The most updates that wait in a cached row before they are sent (0: they are sent at once).",
    )
    group.add_argument(
        "--ngram-lr", type=float, default=0.01, metavar="R", help="Learning rate of Adagrad on rows (0.01)."
    )


def before_checks(args: Any) -> None:
    """Raise ValueError for flags of tables in host memory where tables are on the device."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_host_arguments(parser.add_argument_group())
    for action in parser._actions:
        if args.ngram_storage == "device" and getattr(args, action.dest) != action.default:
            raise ValueError(f"{action.option_strings[0]} needs --ngram-storage host")


def resolve(args: Any, run: RunConfig) -> NgramConfig:
    """Return the tables. Raises ValueError for layers that do not exist, and sizes out of range."""
    for name in ("heads", "rows", "dim"):
        if getattr(args, f"ngram_{name}") < 1:
            raise ValueError(f"--ngram-{name} {getattr(args, f'ngram_{name}')} must be at least 1")
    if args.ngram_layers[-1] > args.num_layers:
        raise ValueError(f"--ngram-layers {args.ngram_layers[-1]}: the model has layers 1 to {args.num_layers}")
    if args.ngram_orders[-1] > args.seq_length:
        raise ValueError(
            f"--ngram-orders {args.ngram_orders[-1]}: no sample is longer than --seq-length {args.seq_length}"
        )
    rule = GramRule(args.ngram_orders, args.ngram_heads, args.ngram_rows)
    host = host_tables(args, run, rule) if args.ngram_storage == "host" else None
    return NgramConfig(args.ngram_layers, rule, args.ngram_dim, args.seed, host)


def host_tables(args: Any, run: RunConfig, rule: GramRule) -> HostTables:
    """Return the settings of tables in host memory. Raises ValueError for bad ones, and where memory is too small."""
    if not 0 <= args.ngram_cache_rows <= 1:
        raise ValueError(f"--ngram-cache-rows {args.ngram_cache_rows:g} is not a share from 0 to 1")
    for name in ("read", "write"):
        if getattr(args, f"ngram_staleness_{name}") < 0:
            raise ValueError(f"--ngram-staleness-{name} {getattr(args, f'ngram_staleness_{name}')} must be at least 0")
    if not 0 < args.ngram_lr < math.inf:
        raise ValueError(f"--ngram-lr {args.ngram_lr:g} must be positive")
    cache = CacheSettings(
        int(args.ngram_cache_rows * rule.num_rows),
        args.ngram_cache_policy,
        args.ngram_staleness_read,
        args.ngram_staleness_write,
    )
    host = HostTables(cache, args.ngram_lr)
    most_of_a_stage = min(len(args.ngram_layers), max(run.stage_layers))
    needed = most_of_a_stage * host.num_bytes(rule, args.ngram_dim, run.cluster.num_ranks)
    host.check_fits(needed, free_host_bytes() / local_processes())
    return host


def build(training: Training, runtime: Runtime) -> Training:
    """Add the memories to the model; the loader makes their rows (``training/hdp.py``)."""
    from megatron.training.utils import print_rank_0

    from megatron.bytescale.core.models.common.embeddings.ngram_memory import NgramMemory, add_memories

    config, hooks = runtime.run.get(NgramConfig), training.model.pre_wrap_hooks
    number = config.num_parameters(runtime.run.shape.hidden)
    layers = ", ".join(map(str, config.layers))
    print_rank_0(f"> bytescale: n-gram memory of {number:,} parameters in each of the layers {layers}")
    if config.host is None:
        hooks.append(partial(add_memories, config, NgramMemory))
        return training
    from megatron.bytescale.core.models.common.embeddings.host_memory import HostMemories, HostNgramMemory

    num_bytes = config.host.num_bytes(config.rule, config.dim, runtime.run.cluster.num_ranks)
    print_rank_0(f"> bytescale: their tables and caches take {num_bytes:,} bytes of host memory each on a rank")
    memories = HostMemories()
    hooks += [partial(add_memories, config, HostNgramMemory), memories.collect]
    training = training.wrap_forward_step(partial(read_rows_first, memories, runtime))
    return training.wrap_finalize(partial(send_rows_last, memories))


def read_rows_first(memories: HostMemories, runtime: Runtime, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first forward pass of a step read the rows of the whole step."""

    def read_and_forward(data_iterator: Any, model: Any) -> Any:
        assert runtime.step is not None
        memories.begin(runtime.step, model.training)
        return forward(data_iterator, model)

    return read_and_forward


def send_rows_last(memories: HostMemories, finalize: Callable[..., Any]) -> Callable[..., Any]:
    """Send the gradients of rows once Megatron has reduced all others, and with them the number of labels."""

    def finalize_and_send(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
        finalize(model, num_tokens, *args, **kwargs)
        memories.end(num_tokens)

    return finalize_and_send


def _on_host(applies: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda args: args.ngram_storage == "host" and applies(args)


_NOT_PLANNED = "remove it: the plan has no place for the memory's tensors"
REFUSALS = (
    refuse("--hdp-loader ray", "ngram", "use --hdp-loader local, which reads the tokens before a shard",
           lambda a: a.hdp_loader == "ray"),
    refuse("--sculpt-attention window", "ngram", "add --sculpt-attention document: n-grams never cross documents",
           lambda a: a.sculpt_windows is not None and a.sculpt_attention != "document"),
    refuse("--draft-heads", "ngram", "train heads of models without a memory"),
    refuse("--fp16 under --ngram-storage host", "ngram", "use --bf16: with a loss scale steps may be skipped",
           _on_host(lambda a: a.fp16)),
    refuse("--ckpt-format under --ngram-storage host", "ngram", "use torch_dist, which saves the rows of each rank",
           _on_host(lambda a: a.ckpt_format != "torch_dist")),
    refuse("--async-save under --ngram-storage host", "ngram", "remove it: tables change while they would be saved",
           _on_host(lambda a: a.async_save)),
    refuse("--disable-gloo-process-groups under --ngram-storage host", "ngram",
           "remove it: rows are exchanged between hosts", _on_host(lambda a: not a.use_gloo_process_groups)),
    refuse("--memory-plan", "ngram", _NOT_PLANNED),
    refuse("--record-memory-plan", "ngram", _NOT_PLANNED),
)  # fmt: skip

NGRAM = Feature(
    name="ngram",
    flag="--ngram-layers",
    summary="n-gram memory: tables of embeddings of the last tokens, before some layers",
    add_arguments=add_arguments,
    is_on=lambda args: args.ngram_layers is not None,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    requires=("hdp",),
    refusals=REFUSALS,
)
