"""Initializes experts as copies of a dense model's MLPs.

Source: He et al. 2024, "Upcycling large language models into mixture of experts". Megatron 0.19.2 converts the weights,
but its training loop cannot upcycle: it builds the dense model from the model's configuration, which still has experts,
and it calls ``load_checkpoint`` with an argument that does not exist. So this module builds and loads the dense model
before DDP wraps the model of experts. Optimizers are created afterwards, from the weights of the experts.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict
from megatron.training.checkpointing import load_checkpoint
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.utils import print_rank_0

from bytescale_ext.config.experts import UpcycleFrom
from megatron.bytescale.arguments.options import override_current
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training


def upcycle(training: Training, runtime: Runtime) -> Training:
    """Copy the dense model into the experts when they are built. Megatron itself then starts without a checkpoint."""
    copying = partial(copy_dense, training.model, runtime.run.get(UpcycleFrom))
    override_current({"moe_use_upcycling": False, "load": None})
    training.model.pre_wrap_hooks.append(copying)
    return training


def dense_config(config: GPTModelConfig, ffn_hidden: int) -> GPTModelConfig:
    """Return the configuration of a dense model whose layers have one MLP of width ``ffn_hidden``."""
    dense = copy.copy(config)
    dense.transformer = copy.copy(config.transformer)
    dense.transformer.num_moe_experts = None
    dense.transformer.ffn_hidden_size = ffn_hidden
    return dense


def copy_dense(
    config: GPTModelConfig, dense_run: UpcycleFrom, model_chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Build the dense model, load it, and copy it into the model of experts. Collective.

    The samples that the dense run has consumed stay consumed, except with ``--finetune``; steps start from 0.
    """
    (model,) = model_chunks
    builder = GPTModelBuilder(dense_config(config, dense_run.ffn_hidden))
    dense = builder.build_model(model.pg_collection, model.pre_process, model.post_process)
    override_current({"load": str(dense_run.load)})
    load_checkpoint([dense], None, None)
    override_current({"load": None, "iteration": 0})
    model.load_state_dict(upcycle_state_dict([model], [dense])["model"])
    print_rank_0(
        f"> bytescale: {config.transformer.num_moe_experts} experts of each layer are copies of {dense_run.load}"
    )
    return model_chunks
