"""Megatron's interleaved schedule over slices, with fake passes instead of the model, to test its messages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule
from megatron.bytescale.core.parallel_state import VirtualLinks, create_virtual_links
from megatron.bytescale.core.pipeline_parallel.seq1f1b import SliceStep

Passes = Callable[[Action, torch.Tensor | None], torch.Tensor]
"""Function from (action, received tensor) to its output [rows, 1, hidden], or the gradient of its input."""


def stage_config(schedule: SliceSchedule, is_overlapped: bool, hidden: int) -> Any:
    """Return Megatron's configuration of a stage, with or without overlapped messages."""
    return TransformerConfig(
        num_layers=schedule.num_stages * schedule.num_chunks, hidden_size=hidden, num_attention_heads=1,
        pipeline_model_parallel_size=schedule.num_stages, virtual_pipeline_model_parallel_size=schedule.num_chunks,
        microbatch_group_size_per_vp_stage=schedule.group_size, pipeline_dtype=torch.float32,
        overlap_p2p_comm=is_overlapped, batch_p2p_comm=not is_overlapped, overlap_p2p_comm_warmup_flush=is_overlapped,
        deallocate_pipeline_outputs=True, calculate_per_token_loss=True, variable_seq_lengths=False,
    )  # fmt: skip


def run_stage(
    schedule: SliceSchedule, stage: int, communicator: Any, passes: Passes, forward_only: bool = False
) -> None:
    """Run a step of one stage with Megatron's schedule function.

    Args:
        schedule: schedule of the stages, with virtual stages.
        stage: number of this stage.
        communicator: communicator of this stage for this step.
        passes: function that replaces the model; tensors are [rows, 1, hidden].
        forward_only: whether to leave out backward passes.
    """
    step = SliceStep(schedule, stage, not forward_only, communicator.wait_for)

    def forward(*args: Any, **_: Any) -> Any:
        action, inputs = step.action, args[4]
        assert action is not None
        if not action.slice_index:
            step.prefixes[action.micro_batch, action.chunk] = MicroBatchPrefix()
        return passes(action, inputs), 0

    def backward(*args: Any) -> torch.Tensor:
        assert step.action is not None
        return passes(step.action, args[2])

    one: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    fakes: dict[str, Any] = {
        "forward_step": forward,
        "backward_step": backward,
        "get_model_config": lambda _: communicator.config,
        "get_model_type": lambda _: None,
        "clear_embedding_activation_buffer": lambda *_: None,
    }
    with patch.multiple(schedules, **fakes):
        step.in_slices(schedules.forward_backward_pipelining_with_interleaving)(
            forward_step_func=None, data_iterator=[None] * schedule.num_chunks,
            model=[torch.nn.Module() for _ in range(schedule.num_chunks)], seq_length=1, micro_batch_size=1,
            num_microbatches=schedule.num_micro_batches * schedule.num_slices, forward_only=forward_only,
            p2p_communicator=communicator, pg_collection=ProcessGroupCollection(tp=one, cp=one),
        )  # fmt: skip
    step.check_finished()
    communicator.check_all_received(not forward_only)


def join_stages(num_stages: int) -> VirtualLinks:
    """Make all processes the stages of a pipeline, with links for overlapped messages. All ranks call this."""
    parallel_state.initialize_model_parallel(1, num_stages, create_gloo_process_groups=False)
    return create_virtual_links(torch.device("cpu"), timeout_minutes=5.0)
