"""Windows of related documents (DataSculpt) as samples, instead of documents or Megatron's samples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.sculpt import ATTENTION, SculptConfig
from bytescale_ext.data.corpus.windows_file import files_of_data_sets
from megatron.bytescale.arguments.conditions import IS_CUT, IS_LOCAL, PLANS_ACTIVATIONS, chosen, equals, given
from megatron.bytescale.arguments.data import DataPaths
from megatron.bytescale.arguments.options import Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


@dataclass(frozen=True, kw_only=True)
class WindowOptions(DataPaths):
    """Flags of windows, and of the data that the windows refer to.

    Attributes:
        sculpt_windows: files of windows, one for each data set.
        sculpt_attention: scope of attention.
        hybrid_data_parallel: whether documents are planned.
        seq_length: maximum number of tokens in a sample.
    """

    sculpt_windows: Sequence[Path]
    sculpt_attention: str | None
    hybrid_data_parallel: bool
    seq_length: int

    @property
    def attention(self) -> str:
        """The scope of attention; by default all earlier tokens of the window."""
        return self.sculpt_attention or ATTENTION[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of windows."""
    group = parser.add_argument_group("bytescale: windows of related documents")
    group.add_argument(
        "--sculpt-windows",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="Train on windows from `bytescale data sculpt`, one file for each data set of the data path; a window is "
        "one sample. Works with and without --hybrid-data-parallel.",
    )
    group.add_argument(
        "--sculpt-attention",
        choices=ATTENTION,
        help="window (default): tokens attend to all earlier tokens of their window; document: only to earlier tokens "
        "of their own document.",
    )


def before_checks(options: WindowOptions) -> Overrides:
    """Return the scope of attention. Without hybrid data parallelism a mask separates the documents of a window."""
    mask = {"create_attention_mask_in_dataloader": options.attention == "document"}
    return {"sculpt_attention": options.attention, **({} if options.hybrid_data_parallel else mask)}


def resolve(options: WindowOptions, run: RunConfig) -> SculptConfig:
    """Return the windows of each data set. Raises ValueError for windows of other data or longer than a sample."""
    prefixes = options.prefixes()
    if not prefixes:
        raise ValueError("no data: give the --data-path of the windows")
    headers = files_of_data_sets(options.sculpt_windows, prefixes)
    for path, header in headers.values():
        if header.context > options.seq_length:
            raise ValueError(
                f"{path}: windows of {header.context} tokens do not fit into --seq-length {options.seq_length}: give "
                f"--seq-length {header.context} or more"
            )
    return SculptConfig({prefix: path for prefix, (path, _) in headers.items()}, options.attention)


def build(training: Training, runtime: Runtime) -> Training:
    """Load windows."""
    from megatron.bytescale.features.hdp import build as hdp
    from megatron.bytescale.training import stock

    if runtime.run.find(HdpConfig) is not None:
        return hdp.train_on_windows(training, runtime)
    return replace(training, dataset_provider=stock.window_provider(runtime.run))


_IS_MASKED = equals("sculpt_attention", "document") & ~given("hybrid_data_parallel")
"""Condition under which only a mask can separate the documents of a window."""
_HDP = "add --hybrid-data-parallel, where documents need no mask"
_OF_DOCUMENTS = "remove it: windows contain whole documents"
REFUSALS = (
    refuse("--hdp-loader ray", "sculpt", "use --hdp-loader local: windows refer to Megatron's data sets",
           equals("hdp_loader", "ray")),
    refuse("--mock-data", "sculpt", "give the --data-path of the windows"),
    refuse("--fim-data", "sculpt", _OF_DOCUMENTS),
    refuse("--reset-position-ids", "sculpt", "remove it: --sculpt-attention document does this"),
    refuse("--reset-attention-mask", "sculpt", "remove it: --sculpt-attention document does this"),
    refuse("--eod-mask-loss", "sculpt", "remove it: --sculpt-attention document does this"),
    refuse("--object-storage-cache-path", "sculpt", "copy the data to a file system"),
    refuse("--per-dataset-sequences-path", "sculpt", "remove it: lengths come from the windows"),
    refuse("--dataloader-fast-cache-load", "sculpt", "remove it: windows keep no index cache"),
    refuse("--dataloader-defer-npy-index-mmap", "sculpt", "remove it: windows keep no index cache"),
    refuse("--full-validation", "sculpt", "use --eval-iters"),
    refuse("--multiple-validation-sets", "sculpt"),
    refuse("--num-experts without hybrid data parallelism", "sculpt",
           "add --hybrid-data-parallel: routers would count the padding of windows",
           given("num_experts") & ~given("hybrid_data_parallel")),
    refuse("--transformer-impl transformer_engine under --sculpt-attention document", "sculpt", _HDP,
           _IS_MASKED & ~IS_LOCAL),
    refuse("--masked-softmax-fusion under --sculpt-attention document", "sculpt", _HDP,
           _IS_MASKED & given("masked_softmax_fusion")),
    refuse("--seq1f1b-slices under --sculpt-attention document", "sculpt", _HDP,
           _IS_MASKED & IS_CUT),
    refuse("--activation-policy under --sculpt-attention document", "sculpt", _HDP,
           _IS_MASKED & PLANS_ACTIVATIONS),
)  # fmt: skip

SCULPT = Feature(
    name="sculpt",
    flag="--sculpt-windows",
    summary="windows of related documents as samples (DataSculpt)",
    add_arguments=add_arguments,
    is_on=chosen("sculpt_windows"),
    options=WindowOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    refusals=REFUSALS,
)
