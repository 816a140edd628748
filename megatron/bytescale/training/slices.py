"""Training in slices (Seq1F1B) on Megatron's own data set: the model's configuration and the forward step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.utils import print_rank_0

from bytescale_ext.attention.kernels import choose_kernel
from bytescale_ext.plan.slices import slice_ranges
from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec, use_document_positions
from megatron.bytescale.core.parallel_state import create_stage_links
from megatron.bytescale.core.pipeline_parallel.seq1f1b import SliceRuntime
from megatron.bytescale.runtime import model_shape
from megatron.bytescale.training import stock
from megatron.bytescale.training.arguments import refusals_of_megatron
from megatron.bytescale.training.seq1f1b import one_stage_note, slice_config


def create_runtime(args: Any) -> SliceRuntime:
    """The state that hooks and patches will share in this process. Raises ValueError for slices that do not fit."""
    return SliceRuntime(slice_config(args, model_shape(args)), stock.read_batch)


def model_config(args: Any, runtime: SliceRuntime) -> GPTModelConfig:
    """Megatron's GPT configuration with attention and positions of slices, and their groups of virtual stages."""
    with refusals_of_megatron():
        config = gpt_config_from_args(args)
    config.transformer_layer_spec = document_layer_spec(runtime)
    config.pre_wrap_hooks.append(partial(_prepare_model, runtime))
    if runtime.config.num_chunks > 1:
        config.transformer.microbatch_group_size_per_vp_stage = runtime.config.group_size
    return config


def _prepare_model(runtime: SliceRuntime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Runs once, on every process, between the building of the model and its wrapping in DDP."""
    args = get_args()
    device = torch.device("cuda", torch.cuda.current_device()) if args.distributed_backend == "nccl" else "cpu"
    runtime.kernel, reason, _ = choose_kernel(device, args.params_dtype, args.kv_channels)
    print_rank_0(f"> bytescale: attention kernel {runtime.kernel.name} ({reason})")
    print_rank_0(f"> bytescale: slices of {' '.join(map(str, runtime.config.lengths))} tokens")
    if runtime.config.eager:
        runtime.links = create_stage_links(args.distributed_timeout_minutes)
    note = one_stage_note(runtime.config.num_stages)
    if note is not None:
        print_rank_0(f"> bytescale: {note}")
    return use_document_positions(model_chunks)


def forward_step(runtime: SliceRuntime) -> Callable[..., Any]:
    """``forward_step_func``: one slice of a micro-batch through the model, or through one stage's chunk of it."""
    per_token, ranges = get_args().calculate_per_token_loss, slice_ranges(runtime.config.lengths)

    def forward(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, params = next(data_iterator)
        part = ranges[params.layout.index]
        cut = {
            name: None if whole is None else whole[:, part.start : part.stop].contiguous()
            for name, whole in batch.items()
            if name != "attention_mask"
        }
        output = model(cut["tokens"], cut["position_ids"], None, labels=cut["labels"], packed_seq_params=params)
        return output, partial(slice_loss, batch["loss_mask"], cut["loss_mask"], runtime.config.num_slices, per_token)

    return forward


def slice_loss(
    whole_mask: torch.Tensor | None, mask: torch.Tensor | None, num_slices: int, per_token: bool, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(sum of the losses, number of labels, report) of one slice, such that Megatron's mean is that of the micro-batch.

    With one loss for each micro-batch Megatron divides by the number of labels given and by the number of slices of the
    step. So the labels are those of the whole micro-batch, and the sum is given ``num_slices`` times. With a loss per
    token it divides once, by the labels of all slices. The report is a sum and a count, added up over slices.

    Args:
        whole_mask, mask: [b, s] and [b, n], 1 where a token has a label; a stage without labels calls no loss.
        losses: [b, n].
    """
    assert whole_mask is not None and mask is not None, "the last stage reads masks"
    total, num_labels, report = stock.mean_loss(mask, losses)
    if per_token:
        return total, num_labels, report
    return total * num_slices, whole_mask.float().sum().to(torch.int), report
