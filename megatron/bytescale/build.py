"""Builds a run: stock training, modified by each enabled feature."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bytescale_ext.plan.setup.choose import remaining_text
from megatron.bytescale import features
from megatron.bytescale.arguments.bad_input import refusals_of_megatron
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.values import Folders, make_folders
from megatron.bytescale.arguments.vocabulary import Vocabulary
from megatron.bytescale.checkpoints import LoadedCheckpoints, check_loaded, use_last_whole
from megatron.bytescale.convert.source import keep_source
from megatron.bytescale.core.parallel_state import connect_groups_of_steps
from megatron.bytescale.resumption import (
    ExpertStates,
    ModelFunction,
    Resumption,
    Source,
    check_expert_states,
    check_model,
    check_source,
    check_unfinished,
)
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training import stock
from megatron.bytescale.training.buffer_types import BufferTypes
from megatron.bytescale.training.pretrain_arguments import Training, stock_training


def build(args: Any, runtime: Runtime) -> Training:
    """Return the training of a run: stock training, modified by each enabled feature in the table's order.

    Creates the run's folders after everything else is built. Raises ValueError for arguments that Megatron refuses,
    unreadable data and checkpoints, unsuitable kernels, and folders that cannot be written.
    """
    training = stock_training(args)
    enabled = features.enabled(args)
    _check_checkpoints(args, runtime.run.process.rank, bool(enabled))
    if args.save and args.load and runtime.run.process.rank == 0:
        keep_source(Path(args.load), Path(args.save))
    if runtime.run.process.rank == 0 and (line := remaining_text(runtime.run.decision)):
        print(line)
    for feature in enabled:
        training = feature.build(training, runtime)
    if enabled:
        types = BufferTypes()
        training.model.pre_wrap_hooks.append(types.note)
        training.model.post_wrap_hooks.append(types.restore)
        training.model.post_wrap_hooks.append(partial(connect_groups_of_steps, device=runtime.device))
    if training.dataset_provider is stock.dataset_provider:
        with refusals_of_megatron():
            stock.dataset_config()
    make_folders(options_of(args, Folders))
    process = runtime.run.process
    if not process.on_cuda and process.rank == 0:
        print("> bytescale: training on CPU with gloo; CUDA calls are replaced (megatron/bytescale/cpu.py)")
    return training


def _check_checkpoints(args: Any, rank: int, has_features: bool) -> None:
    """Check what Megatron will load. With features, the first rank repairs the tracker file."""
    checkpoints, share = options_of(args, LoadedCheckpoints), (rank, args.world_size)
    is_repaired = has_features and bool(args.load) and not args.enable_msc
    if is_repaired and rank == 0 and (warning := use_last_whole(Path(args.load), args.ckpt_step)):
        print(warning)
        share = (0, 1)
    check_loaded(checkpoints, share, is_repaired=is_repaired and rank > 0)
    source = options_of(args, Source)
    check_source(source)
    check_unfinished(options_of(args, Resumption))
    check_expert_states(options_of(args, ExpertStates))
    vocabulary = options_of(args, Vocabulary)
    warning = check_model(
        source, options_of(args, ModelFunction), vocabulary.num_tokens(), vocabulary.padded_vocab_size
    )
    if warning and rank == 0:
        print(warning)
