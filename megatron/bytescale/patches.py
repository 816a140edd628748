"""The one table of what is replaced in Megatron. At most eight rows; a test counts them."""

from __future__ import annotations

from megatron.bytescale.core.optimizer.distrib_optimizer import wrap_get_megatron_optimizer
from megatron.bytescale.core.pipeline_parallel.schedules import wrap_get_forward_backward_func
from megatron.bytescale.registry import Patch
from megatron.bytescale.training.training import wrap_training_log

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        wrap=wrap_get_forward_backward_func,
        feature="--hybrid-data-parallel",
        why="train_step and evaluate pass one num_microbatches for all ranks; ours differ from rank to rank",
        source_hash="9d8e0a75be40",
        aliases=("megatron.core.pipeline_parallel", "megatron.training.training"),
    ),
    Patch(
        target="megatron.training.training:training_log",
        wrap=wrap_training_log,
        feature="--hybrid-data-parallel",
        why="the log line has no hook, and its interval decides when figures are gathered",
        source_hash="5e34a182d566",
    ),
    Patch(
        target="megatron.core.optimizer:get_megatron_optimizer",
        wrap=wrap_get_megatron_optimizer,
        feature="--hybrid-data-parallel",
        why="without TransformerEngine a sharded optimizer cannot load a checkpoint; no hook lies before loading",
        source_hash="b473223298c4",
        aliases=("megatron.training.training",),
    ),
)
