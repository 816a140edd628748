"""Trains in slices (Seq1F1B): fixed-length samples of Megatron's own data set, or documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.training.utils import print_rank_0

from bytescale_ext.activation.arena import allocate_arena
from bytescale_ext.activation.link import make_link
from bytescale_ext.config.slices import DocumentSliceConfig, SliceConfig
from bytescale_ext.plan.schedule.slices import slice_ranges
from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import LossDivision, Messages
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec
from megatron.bytescale.core.parallel_state import create_stage_links, create_virtual_links
from megatron.bytescale.features.activations.build import prepare_kernel
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training import stock
from megatron.bytescale.training.pretrain_arguments import Training


def cut_documents(training: Training, runtime: Runtime) -> Training:
    """Run micro-batches of documents in slices."""
    config = runtime.run.get(DocumentSliceConfig)
    training.model.transformer.microbatch_group_size_per_vp_stage = config.group_size
    training.model.pre_wrap_hooks.append(partial(prepare_documents, runtime))
    return training


def cut_samples(training: Training, runtime: Runtime) -> Training:
    """Run Megatron's samples in slices, which attend to earlier slices and have positions in the whole sample."""
    config, model = runtime.run.get(SliceConfig), training.model
    runtime.add_parts(read_batch=stock.read_batch)
    model.transformer_layer_spec = document_layer_spec(runtime)
    model.pre_wrap_hooks.append(partial(prepare_samples, runtime))
    if config.num_chunks > 1:
        model.transformer.microbatch_group_size_per_vp_stage = config.group_size
    return replace(training, forward_step=forward_step(config))


def prepare_documents(runtime: Runtime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Prepare the stages and report which keys are kept. Collective; runs before DDP wraps the model."""
    config, on_cuda = runtime.run.get(DocumentSliceConfig), runtime.run.process.on_cuda
    _prepare_stages(runtime, config)
    if config.host_bytes and runtime.parts.activations is None:  # a policy's arena also serves keys
        runtime.add_parts(key_link=make_link(allocate_arena(int(config.host_bytes), on_cuda), on_cuda))
    if config.note:
        print_rank_0(f"> bytescale: {config.note}")
    return model_chunks


def prepare_samples(runtime: Runtime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Choose the kernel and prepare the stages. Collective; runs before DDP wraps the model."""
    config = runtime.run.get(SliceConfig)
    prepare_kernel(runtime, model_chunks)
    print_rank_0(f"> bytescale: slices of {' '.join(map(str, config.lengths))} tokens")
    _prepare_stages(runtime, config)
    return use_document_positions(model_chunks)


def _prepare_stages(runtime: Runtime, config: SliceConfig | DocumentSliceConfig) -> None:
    """Create the process groups for messages during passes, and warn if slices have no benefit. Collective."""
    if current(Messages).overlap_p2p_comm:
        runtime.add_parts(links=create_virtual_links(runtime.device, runtime.run.process.timeout_minutes))
    elif config.receives_ahead:
        runtime.add_parts(links=create_stage_links(runtime.device, runtime.run.process.timeout_minutes))
    if config.num_stages == 1:
        print_rank_0(
            "> bytescale: a single pipeline stage has no idle time for slices to fill. With --recompute-granularity "
            "full slices limit the activations of the running layer; otherwise they only cost time"
        )


def forward_step(config: SliceConfig) -> Callable[..., Any]:
    """Return a ``forward_step_func`` that runs one slice of a micro-batch through the model or a stage's chunk."""
    per_token, ranges = current(LossDivision).calculate_per_token_loss, slice_ranges(config.lengths)

    def forward(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, params = next(data_iterator)
        rows = ranges[params.layout.index]
        part = {
            name: None if whole is None else whole[:, rows.start : rows.stop].contiguous()
            for name, whole in batch.items()
            if name != "attention_mask"
        }
        output = model(part["tokens"], part["position_ids"], None, labels=part["labels"], packed_seq_params=params)
        return output, partial(slice_loss, batch["loss_mask"], part["loss_mask"], config.slicing.num_slices, per_token)

    return forward


def slice_loss(
    whole_mask: torch.Tensor | None, mask: torch.Tensor | None, num_slices: int, per_token: bool, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return (sum of the losses, number of labels, report) of one slice.

    The loss of a step is the same as without slices. With a loss per micro-batch, Megatron treats each slice as a
    micro-batch and divides by the number of labels and by the step's number of slices. So this function returns the
    number of labels of the whole micro-batch, and multiplies the sum by ``num_slices``. With a loss per token, Megatron
    divides once, by the labels of all slices. The report contains a sum and a count, which Megatron adds up over
    slices.

    Args:
        whole_mask: mask of the whole micro-batch, [b, s], 1 for tokens with a label.
        mask: part of the mask for this slice, [b, n].
        num_slices: slices of a micro-batch.
        per_token: whether ``--calculate-per-token-loss`` is set.
        losses: loss of each token of this slice, [b, n].
    """
    assert whole_mask is not None and mask is not None, "only the last stage computes losses, and it reads masks"
    total, num_labels, report = stock.mean_loss(mask, losses)
    if per_token:
        return total, num_labels, report
    return total * num_slices, whole_mask.float().sum().to(torch.int), report
