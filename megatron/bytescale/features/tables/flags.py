"""N-gram memory (Engram, Cheng et al. 2026), and tables in host memory (HET, Miao et al. 2021).

The vocabulary embedding and n-gram tables are parameters, or tables in host memory. All tables in host memory have
the same cache settings and learning rate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bytescale_ext.config.memory.tables import EmbeddingConfig, HostTables, NgramConfig, TablesConfig, check_host_room
from bytescale_ext.config.run import RunConfig
from bytescale_ext.data.samples.grams import GramRule, numbers
from bytescale_ext.measure.host_memory import free_host_bytes, local_processes
from bytescale_ext.states.cache import POLICIES, CacheSettings
from megatron.bytescale.arguments.conditions import Condition, chosen, equals, given, includes
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.arguments.refusals import Refusal, refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

LAYERS: Final = "--ngram-layers"
HOST: Final = "--host-tables"
KINDS: Final = ("ngram", "embedding")
FRESH_STEPS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of tables."""
    group = parser.add_argument_group("bytescale: tables")
    group.add_argument(
        LAYERS,
        type=numbers,
        metavar="N,N",
        help="Add an n-gram memory to these layers, numbered from 1: the last few tokens of a document are hashed to "
        "table rows, which are added to the layer's input behind a gate. N-grams never cross documents. Each layer "
        "has its own table. Needs --hybrid-data-parallel. `bytescale ngram` counts the rows that a data set uses.",
    )
    _add_ngram_arguments(group)
    group.add_argument(
        HOST,
        nargs="+",
        choices=KINDS,
        default=(),
        help="Tables in host memory instead of device memory: n-gram tables, the vocabulary embedding, or both. The "
        "HDP ranks divide the rows of each table and update them by row-wise Adagrad. Each rank has a cache of rows. "
        "An embedding in host memory needs --untie-embeddings-and-output-weights, and pays off if a step reads a small "
        "part of the vocabulary. Default: tables are parameters on every rank.",
    )
    _add_cache_arguments(group)


def _add_ngram_arguments(group: argparse._ActionsContainer) -> None:
    """Add the sizes of n-gram tables."""
    group.add_argument(
        "--ngram-orders", type=numbers, default=(2, 3), metavar="N,N", help="Lengths of n-grams in tokens (2,3)."
    )
    group.add_argument("--ngram-heads", type=int, default=4, metavar="N", help="Rows per n-gram (4).")
    group.add_argument("--ngram-rows", type=int, default=1 << 20, metavar="N", help="Rows of each table (1048576).")
    group.add_argument("--ngram-dim", type=int, default=64, metavar="N", help="Values per row (64).")


def _add_cache_arguments(group: argparse._ActionsContainer) -> None:
    """Add the settings that all tables in host memory share."""
    group.add_argument(
        "--table-cache-rows",
        type=float,
        default=0.1,
        metavar="S",
        help="Size of a rank's cache, as a share of the table's rows (0.1).",
    )
    group.add_argument(
        "--table-cache-policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="Cached row to evict: the least recently used (lru, default), the least frequently used (lfu), or the "
        "least frequently used except rows that were used ten times (lfuopt).",
    )
    group.add_argument(
        "--table-staleness",
        type=_staleness,
        default=(0, 0, FRESH_STEPS),
        metavar="R,W",
        help="Staleness bounds of cached rows: a row may lack up to R updates when it is read, and up to W updates "
        "wait in the cache before they are sent. Default: 0,0, which always reads the newest row. A third number, as "
        f"in 10,10,500, sets the warm-up steps in which both bounds are 0 ({FRESH_STEPS}): rows change most then.",
    )
    group.add_argument(
        "--table-lr", type=float, default=0.01, metavar="R", help="Learning rate of row-wise Adagrad (0.01)."
    )


def _staleness(text: str) -> tuple[int, int, int]:
    """Return read bound, write bound and warm-up steps of "R,W" or "R,W,STEPS"."""
    parts = text.split(",")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not R,W or R,W,STEPS in whole numbers, such as 10,10,500")
    read, write, *steps = map(int, parts)
    return read, write, steps[0] if steps else FRESH_STEPS


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Arguments that decide how much host memory is free for tables and pages.

    Attributes:
        fake_process_group: whether the run is a dry run, for another machine.
        host_memory_gb: host memory of each process for activations.
    """

    fake_process_group: bool
    host_memory_gb: float | None


def free_bytes_of_process(memory: HostMemory) -> float:
    """Return the bytes of free host memory for each process of this machine, minus ``--host-memory-gb``.

    A dry run has no limit, because it is for another machine.
    """
    if memory.fake_process_group:
        return math.inf
    return max(0.0, free_host_bytes() / local_processes() - (memory.host_memory_gb or 0.0) * 1e9)


@dataclass(frozen=True, kw_only=True)
class TableOptions(HostMemory):
    """Flags of tables, and Megatron's arguments that they depend on.

    Attributes:
        ngram_layers: layers with an n-gram memory, numbered from 1; None: no layer.
        ngram_orders: lengths of n-grams in tokens.
        ngram_heads: rows per n-gram.
        ngram_rows: rows of each n-gram table.
        ngram_dim: values per row of an n-gram table.
        host_tables: kinds of tables in host memory.
        table_cache_rows: size of a rank's cache, as a share of the table's rows.
        table_cache_policy: eviction policy of the caches.
        table_staleness: read bound, write bound, and number of first steps with both bounds at 0.
        table_lr: learning rate of row-wise Adagrad.
        num_layers: layers of the model.
        seq_length: largest number of tokens of a sample.
        seed: seed of the run.
    """

    ngram_layers: tuple[int, ...] | None
    ngram_orders: tuple[int, ...]
    ngram_heads: int
    ngram_rows: int
    ngram_dim: int
    host_tables: Sequence[str]
    table_cache_rows: float
    table_cache_policy: str
    table_staleness: tuple[int, int, int]
    table_lr: float
    num_layers: int
    seq_length: int
    seed: int

    def host(self, num_rows: int) -> HostTables:
        """Return the settings of a table in host memory. Raises ValueError for values out of range."""
        if not 0 <= self.table_cache_rows <= 1:
            raise ValueError(f"--table-cache-rows {self.table_cache_rows:g} is not a share from 0 to 1")
        if not 0 < self.table_lr < math.inf:
            raise ValueError(f"--table-lr {self.table_lr:g} must be positive and finite")
        read_bound, write_bound, fresh_steps = self.table_staleness
        num_lines = int(self.table_cache_rows * num_rows)
        cache = CacheSettings(num_lines, self.table_cache_policy, read_bound, write_bound)
        return HostTables(cache, self.table_lr, fresh_steps)

    def ngram(self) -> NgramConfig | None:
        """Return the n-gram tables. Raises ValueError for layers that do not exist, and sizes out of range."""
        if self.ngram_layers is None:
            return None
        sizes = {"heads": self.ngram_heads, "rows": self.ngram_rows, "dim": self.ngram_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"--ngram-{name} {size} must be at least 1")
        layers, orders = self.ngram_layers, self.ngram_orders
        if layers[-1] > self.num_layers:
            raise ValueError(f"--ngram-layers {layers[-1]}: the model has layers 1 to {self.num_layers}")
        if orders[-1] > self.seq_length:
            raise ValueError(f"--ngram-orders {orders[-1]}: no sample is longer than --seq-length {self.seq_length}")
        rule = GramRule(orders, self.ngram_heads, self.ngram_rows)
        host = self.host(rule.num_rows) if "ngram" in self.host_tables else None
        return NgramConfig(layers, rule, self.ngram_dim, self.seed, host)


def before_checks(options: TableOptions) -> Overrides:
    """Raise ValueError for flags of tables that the run does not have."""
    if options.ngram_layers is None:
        if "ngram" in options.host_tables:
            raise ValueError(f"{HOST} ngram needs {LAYERS}")
        _check_not_given(options, _add_ngram_arguments, LAYERS)
    if not options.host_tables:
        _check_not_given(options, _add_cache_arguments, HOST)
    return NO_OVERRIDES


def _check_not_given(options: TableOptions, add: Callable[[argparse._ActionsContainer], None], needed: str) -> None:
    """Raise ValueError if one of the flags that ``add`` adds is given."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    for action in parser._actions:
        if getattr(options, action.dest) != action.default:
            raise ValueError(f"{action.option_strings[0]} needs {needed}")


def resolve(options: TableOptions, run: RunConfig) -> TablesConfig:
    """Return the tables. Raises ValueError for values out of range, and for too little host memory."""
    embedding, num_rows = None, run.shape.vocab
    if "embedding" in options.host_tables:
        embedding = EmbeddingConfig(options.host(num_rows), num_rows, run.shape.hidden)
    tables = TablesConfig(options.ngram(), embedding)
    sizes = (
        "--table-cache-rows, --ngram-rows or --ngram-dim" if "ngram" in options.host_tables else "--table-cache-rows"
    )
    needed = tables.host_bytes(run.stage_layers, run.cluster.num_ranks)
    check_host_room(needed, free_bytes_of_process(options), f"lower {sizes}, or use more ranks")
    return tables


def build(training: Training, runtime: Runtime) -> Training:
    """Add n-gram memories to the model, and replace its embedding."""
    from megatron.bytescale.features.tables.build import add_tables

    return add_tables(training, runtime)


def _with_host_tables(what: str, instead: str, applies: Condition) -> Refusal:
    return refuse(f"{what} under {HOST}", "tables", instead, given("host_tables") & applies)


def _with_host_embedding(what: str, instead: str, applies: Condition) -> Refusal:
    return refuse(f"{what} under {HOST} embedding", "tables", instead, includes("host_tables", "embedding") & applies)


_NOT_PLANNED = "remove it: the plan has no place for rows of tables"
REFUSALS = (
    refuse("--hdp-loader ray with --ngram-layers", "tables",
           "use --hdp-loader local, which reads the tokens before a shard",
           chosen("ngram_layers") & equals("hdp_loader", "ray")),
    refuse("--sculpt-attention window with --ngram-layers", "tables",
           "add --sculpt-attention document: n-grams never cross documents",
           chosen("ngram_layers") & chosen("sculpt_windows") & ~equals("sculpt_attention", "document")),
    refuse("--draft-heads", "tables", "train heads of models without n-gram memory, with the embedding on the device"),
    refuse("--memory-plan", "tables", _NOT_PLANNED),
    refuse("--record-memory-plan", "tables", _NOT_PLANNED),
    _with_host_embedding("tied embeddings",
                         "add --untie-embeddings-and-output-weights: the output layer needs all rows",
                         ~given("untie_embeddings_and_output_weights")),
    _with_host_embedding("--mtp-num-layers", "remove it: its layers share the embedding", given("mtp_num_layers")),
    _with_host_tables("--fp16", "use --bf16: with a loss scale steps may be skipped", given("fp16")),
    _with_host_tables("--ckpt-format", "use torch_dist, which saves the rows of each rank",
                      ~equals("ckpt_format", "torch_dist")),
    _with_host_tables("--async-save", "remove it: tables change while they would be saved", given("async_save")),
    _with_host_tables("--disable-gloo-process-groups", "remove it: hosts exchange rows over gloo",
                      ~(given("use_gloo_process_groups") | given("fake_process_group"))),
)  # fmt: skip

TABLES = Feature(
    name="tables",
    flag=LAYERS,
    other_flags=(HOST,),
    summary="n-gram memory (Engram), and tables in host memory (HET)",
    add_arguments=add_arguments,
    is_on=chosen("ngram_layers") | given("host_tables"),
    options=TableOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    needs=f"{LAYERS} or {HOST}",
    requires=("hdp",),
    refusals=REFUSALS,
)
