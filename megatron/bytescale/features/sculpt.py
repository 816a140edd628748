"""Windows of related documents (DataSculpt) as samples, in the place of documents or of Megatron's samples."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.sculpt import ATTENTION, SculptConfig
from bytescale_ext.data.corpus.windows_file import files_of_data_sets
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of windows."""
    group = parser.add_argument_group("bytescale: windows of related documents")
    group.add_argument(
        "--sculpt-windows",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="Train on windows that `bytescale data sculpt` has made, one file for each data set of the data path: "
        "a window is one sample. With --hybrid-data-parallel and without.",
    )
    group.add_argument(
        "--sculpt-attention",
        choices=ATTENTION,
        help="window (default): tokens attend to everything before them in their window; document: to their own "
        "document alone.",
    )


def before_checks(args: Any) -> None:
    """Choose the attention; without hybrid data parallelism documents of a window are kept apart by a mask."""
    args.sculpt_attention = args.sculpt_attention or ATTENTION[0]
    if not args.hybrid_data_parallel:
        args.create_attention_mask_in_dataloader = _needs_mask(args)


def resolve(args: Any, run: RunConfig) -> SculptConfig:
    """Return the windows of each data set. Raises ValueError for windows of other data, or longer than a sample."""
    from megatron.bytescale.training.stock import data_prefixes

    prefixes = data_prefixes(args)
    if not prefixes:
        raise ValueError("no data: give the --data-path that the windows are of")
    found = files_of_data_sets(args.sculpt_windows, prefixes)
    for path, header in found.values():
        if header.context > args.seq_length:
            raise ValueError(
                f"{path}: windows of {header.context} tokens do not fit into --seq-length {args.seq_length}: give "
                f"--seq-length {header.context} or more"
            )
    return SculptConfig({prefix: path for prefix, (path, _) in found.items()}, args.sculpt_attention)


def build(training: Training, runtime: Runtime) -> Training:
    """Load windows."""
    from megatron.bytescale.features.hdp import build as hdp
    from megatron.bytescale.training import stock

    if runtime.run.find(HdpConfig) is not None:
        return hdp.train_on_windows(training, runtime)
    return replace(training, dataset_provider=stock.window_provider(runtime.run.get(SculptConfig)))


def _needs_mask(args: Any) -> bool:
    """Return whether only a mask can keep the documents of a window apart."""
    return args.sculpt_attention == "document" and not args.hybrid_data_parallel


def _masked(applies: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda args: _needs_mask(args) and applies(args)


_HDP = "add --hybrid-data-parallel, where documents need no mask"
_OF_DOCUMENTS = "remove it: windows hold whole documents"
REFUSALS = (
    refuse("--hdp-loader ray", "sculpt", "use --hdp-loader local: windows are of Megatron's data sets",
           lambda a: a.hdp_loader == "ray"),
    refuse("--mock-data", "sculpt", "give the --data-path that the windows are of"),
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
           "add --hybrid-data-parallel: the padding of windows would count where experts are chosen",
           lambda a: a.num_experts and not a.hybrid_data_parallel),
    refuse("--transformer-impl transformer_engine under --sculpt-attention document", "sculpt", _HDP,
           _masked(lambda a: a.transformer_impl != "local")),
    refuse("--masked-softmax-fusion under --sculpt-attention document", "sculpt", _HDP,
           _masked(lambda a: a.masked_softmax_fusion)),
    refuse("--seq1f1b-slices under --sculpt-attention document", "sculpt", _HDP,
           _masked(lambda a: a.seq1f1b_slices not in (None, 1))),
    refuse("--activation-policy under --sculpt-attention document", "sculpt", _HDP,
           _masked(lambda a: a.activation_policy != "none" or a.swap_fraction is not None
                   or a.recompute_fraction is not None)),
)  # fmt: skip

SCULPT = Feature(
    name="sculpt",
    flag="--sculpt-windows",
    summary="windows of related documents as samples (DataSculpt)",
    add_arguments=add_arguments,
    is_on=lambda args: args.sculpt_windows is not None,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    refusals=REFUSALS,
)
