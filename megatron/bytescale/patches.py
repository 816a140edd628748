"""The one table of what is replaced in Megatron. At most eight rows; a test counts them."""

from __future__ import annotations

from megatron.bytescale.core.optimizer.distrib_optimizer import wrap_get_megatron_optimizer
from megatron.bytescale.core.pipeline_parallel import seq1f1b
from megatron.bytescale.core.pipeline_parallel.schedules import wrap_get_forward_backward_func
from megatron.bytescale.registry import Patch
from megatron.bytescale.training.initialize import wrap_compile_helpers, wrap_set_jit_fusion_options
from megatron.bytescale.training.training import wrap_training_log

ALWAYS = "always"

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        wrap=wrap_compile_helpers,
        feature=ALWAYS,
        why="every run from the PyPI wheel would end here: it has the built helper and no Makefile",
        source_hash="84029a50ae8c",
    ),
    Patch(
        target="megatron.training.initialize:set_jit_fusion_options",
        wrap=wrap_set_jit_fusion_options,
        feature="--hybrid-data-parallel",
        why="its warm-up makes tensors of --seq-length rows, the longest context; no flag turns it off",
        source_hash="fe3ec3dcf2af",
        aliases=("megatron.training.training",),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        wrap=wrap_get_forward_backward_func,
        feature="--hybrid-data-parallel",
        why="train_step and evaluate pass one num_microbatches for all ranks; ours differ from rank to rank",
        source_hash="9d8e0a75be40",
        aliases=("megatron.core.pipeline_parallel", "megatron.training.training"),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        wrap=seq1f1b.wrap_get_forward_backward_func,
        feature="--seq1f1b-splits",
        why="no argument of the schedules gives a longer warm-up or another order of backward passes",
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
        why="without TransformerEngine a sharded optimizer cannot load or save every checkpoint; no hook lies before",
        source_hash="b473223298c4",
        aliases=("megatron.training.training",),
    ),
)
