"""The table of all Megatron functions that are replaced or copied, and of all Megatron classes with our subclasses.

Megatron is not changed in any other way. Functions with ``wrap`` are replaced while their feature is enabled. Functions
without ``wrap`` stay unchanged: slices run copies of the two pipeline schedules with three names bound to functions of
``SliceStep``. Classes also stay unchanged: objects of one run become objects of a ``subclass``.
"""

from __future__ import annotations

from megatron.bytescale.core.distributed.host_build import wrap_param_and_grad_buffer
from megatron.bytescale.core.distributed.ordered_reductions import OrderedBucketGroup
from megatron.bytescale.core.distributed.param_and_grad_buffer import HostBucketGroup, HostBuffer, taking_gradients
from megatron.bytescale.core.models.gpt.gpt_layer_specs import wrap_mtp_block_spec
from megatron.bytescale.core.models.gpt.multi_token import LaterTokenLayer
from megatron.bytescale.core.optimizer.clip_grads import wrap_clip_grad_by_total_norm_fp32
from megatron.bytescale.core.optimizer.distrib_optimizer import (
    wrap_get_megatron_optimizer,
    wrap_load_state_dict,
    wrap_set_main_param_and_optimizer_states,
)
from megatron.bytescale.core.optimizer.late import flushing
from megatron.bytescale.core.optimizer.optimizer import paged
from megatron.bytescale.core.optimizer.qk_clip import wrap_clip_qk
from megatron.bytescale.core.pipeline_parallel.schedules import wrap_get_forward_backward_func
from megatron.bytescale.core.tensor_parallel.random import wrap_get_cuda_rng_state, wrap_set_cuda_rng_state
from megatron.bytescale.registry import Patch, Source
from megatron.bytescale.training.initialize import (
    wrap_compile_helpers,
    wrap_set_jit_fusion_options,
    wrap_warmup_jit_function,
)
from megatron.bytescale.training.training import wrap_check_checkpoint_args, wrap_training_log
from megatron.bytescale.versions import TESTED

ALWAYS, CPU, HDP, MULTI_TOKEN, QK_CLIP = "always", "cpu", "hdp", "multi_token", "qk_clip"
SCULPT, SLICES, STATES = "sculpt", "slices", "states"
NEXT = ("0.20.0",)  # the main branch of NVIDIA/Megatron-LM at d98e8a64 of 2026-08-22
ALL = TESTED + NEXT

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        wrap=wrap_compile_helpers,
        features=(ALWAYS,),
        why="it would end every run from the PyPI wheel, which has the built helper but no Makefile",
        sources=(Source("84029a50ae8c", ALL),),
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        wrap=wrap_get_cuda_rng_state,
        features=(CPU,),
        why="it reads CUDA's generator through torch's C++ bindings, which allow no stand-in",
        sources=(Source("aa26caaa069c", ALL),),
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        wrap=wrap_set_cuda_rng_state,
        features=(CPU,),
        why="it sets CUDA's generator through torch's C++ bindings, which allow no stand-in",
        sources=(Source("b179c9d95438", ALL),),
    ),
    Patch(
        target="megatron.training.initialize:_warmup_jit_function",
        wrap=wrap_warmup_jit_function,
        features=(CPU,),
        why="it warms up fused CUDA kernels; no flag turns it off",
        sources=(Source("e7c1707d8b9b", ALL),),
    ),
    Patch(
        target="megatron.training.initialize:set_jit_fusion_options",
        wrap=wrap_set_jit_fusion_options,
        features=(HDP,),
        why="its warm-up makes tensors of --seq-length rows, the longest context; no flag turns it off",
        sources=(Source("fe3ec3dcf2af", ALL),),
        aliases=("megatron.training.training",),
    ),
    Patch(
        target="megatron.training.checkpointing:check_checkpoint_args",
        wrap=wrap_check_checkpoint_args,
        features=(HDP, SCULPT),
        why="only it sees a checkpoint's own counts; a hook after loading sees only the sum",
        sources=(Source("4c636308e56b", TESTED), Source("3686ceb294bc", NEXT)),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        wrap=wrap_get_forward_backward_func,
        features=(HDP, SLICES),
        why="train_step and evaluate pass one num_microbatches for all ranks, and no argument reorders slices",
        sources=(Source("9d8e0a75be40", ALL),),
        aliases=("megatron.core.pipeline_parallel", "megatron.training.training"),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        features=(SLICES,),
        why="no argument gives a longer warm-up or another order of backward passes",
        sources=(Source("772d6b7d8182", TESTED), Source("b2582d25713c", NEXT)),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        features=(SLICES,),
        why="no argument gives a longer warm-up or another order of backward passes",
        sources=(Source("091263d1c27e", TESTED), Source("f772f7d344ef", NEXT)),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_step",
        features=(SLICES,),
        why="the schedules call it by name; slices keep its input and output until their backward pass",
        sources=(Source("24c526af4445", TESTED), Source("d24e8a478a19", NEXT)),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:backward_step",
        features=(SLICES,),
        why="the schedules call it by name, for the oldest forward pass; slices run backward last slice first",
        sources=(Source("435628e2479e", TESTED), Source("b767f2485190", NEXT)),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches",
        features=(SLICES,),
        why="the schedules call it by name; slices need a longer warm-up",
        sources=(Source("78a8e057bdbb", ALL),),
    ),
    Patch(
        target="megatron.training.training:training_log",
        wrap=wrap_training_log,
        features=(HDP,),
        why="the log line has no hook, and its interval decides when figures are gathered",
        sources=(Source("5e34a182d566", TESTED), Source("03adda0fdaca", NEXT)),
    ),
    Patch(
        target="megatron.core.optimizer:get_megatron_optimizer",
        wrap=wrap_get_megatron_optimizer,
        features=(HDP, STATES, QK_CLIP),
        why="without TransformerEngine a sharded optimizer cannot load or save every checkpoint; no hook runs before",
        sources=(Source("b473223298c4", TESTED), Source("a4db1e83c8df", NEXT)),
        aliases=("megatron.training.training",),
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        wrap=wrap_set_main_param_and_optimizer_states,
        features=(HDP, STATES, QK_CLIP),
        why="without TransformerEngine it reads a step that the sharded tensors lack; no hook skips it",
        sources=(Source("40cab7846597", ALL),),
    ),
    Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        wrap=wrap_load_state_dict,
        features=(HDP, STATES, QK_CLIP),
        why="a checkpoint with another number of parts ends in a KeyError; Megatron's optimizers have no load hooks",
        sources=(Source("403774c7dde1", ALL),),
    ),
    Patch(
        target="megatron.core.optimizer.qk_clip:clip_qk",
        wrap=wrap_clip_qk,
        features=(QK_CLIP,),
        why="it fails on shards of float32 weights, which train_step does not pass, and waits for the device per layer",
        sources=(Source("283de8583076", ALL),),
        aliases=("megatron.training.training",),
    ),
    Patch(
        target="megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        wrap=wrap_clip_grad_by_total_norm_fp32,
        features=(STATES,),
        why="it refuses gradients in host memory (--state-stage 2 and 3); optimizers call it by name",
        sources=(Source("cf07b488fb76", ALL),),
        aliases=("megatron.core.optimizer.optimizer", "megatron.core.models.mimo.optimizer"),
    ),
    Patch(
        target="megatron.training.models.gpt:mtp_block_spec",
        wrap=wrap_mtp_block_spec,
        features=(MULTI_TOKEN,),
        why="it makes the specs of multi-token prediction itself, without the layer spec of the model",
        sources=(Source("43ccd8c4a276", ALL),),
    ),
    Patch(
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
        wrap=wrap_param_and_grad_buffer,
        features=(STATES,),
        why="its memory is host memory from stage 2 on; only it knows the ranks that may share it",
        sources=(Source("38d0b3c383c1", TESTED), Source("d4cad5b459e5", NEXT)),
    ),
    Patch(
        target="megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
        subclass=paged,
        features=(STATES,),
        why="its float32 copies and states are in pages; Megatron builds the optimizer from a fixed list of classes",
        sources=(Source("efe6cb1a7919", ALL),),
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        subclass=paged,
        features=(STATES,),
        why="its float32 copies and states are in pages; Megatron builds the optimizer from a fixed list of classes",
        sources=(Source("654c9c1dbd22", ALL),),
    ),
    Patch(
        target="megatron.core.optimizer.optimizer:FP32Optimizer",
        subclass=taking_gradients,
        features=(STATES,),
        why="its gradients come from host memory from stage 2 on; Megatron calls no hook before it takes them",
        sources=(Source("5ebce57749fd", ALL),),
    ),
    Patch(
        target="megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
        subclass=taking_gradients,
        features=(STATES,),
        why="its gradients come from host memory from stage 2 on; Megatron calls no hook before it takes them",
        sources=(Source("ab71156b7e57", ALL),),
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        subclass=taking_gradients,
        features=(STATES,),
        why="its gradients come from host memory from stage 2 on; Megatron calls no hook before it takes them",
        sources=(Source("ab71156b7e57", ALL),),
    ),
    Patch(
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer",
        subclass=HostBuffer,
        features=(STATES,),
        why="its gradients are in host memory from stage 2 on; DDP creates the buffer itself",
        sources=(Source("ae459020edfb", ALL),),
    ),
    Patch(
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
        subclass=HostBucketGroup,
        features=(STATES,),
        why="it reduces gradients from host memory in chunks; DDP creates the groups itself",
        sources=(Source("0c5c739a6c0f", ALL),),
    ),
    Patch(
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
        subclass=OrderedBucketGroup,
        features=(HDP,),
        why="its overlapped reduction waits for exchanges of rings; DDP creates the groups itself and has no hook",
        sources=(Source("fa31a42a7368", ALL),),
    ),
    Patch(
        target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        subclass=flushing,
        features=(STATES,),
        why="late updates end before a save or an evaluation; Megatron calls no hook before either",
        sources=(Source("9701d6398952", ALL),),
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer",
        subclass=LaterTokenLayer,
        features=(MULTI_TOKEN,),
        why="it shifts rows beyond the ends of documents; no layer spec names the layer's class",
        sources=(Source("308b3cf67932", TESTED), Source("1abfb71d9bf7", NEXT)),
    ),
)


def rows_of(*features: str) -> list[Patch]:
    """Return the rows that any of these features needs, in the table's order."""
    return [patch for patch in PATCHES if not set(features).isdisjoint(patch.features)]
