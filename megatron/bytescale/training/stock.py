"""Training as Megatron ships it: samples of one length from its GPTDataset. Features build on this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.data.samples.lengths import check_token_ids
from megatron.bytescale.arguments.data import DataArguments, MiddleArguments, SampleArguments
from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import LossChecks, SampleBatches
from megatron.bytescale.core.datasets.document_dataset import check_splits
from megatron.bytescale.core.datasets.index_cache import build_datasets
from megatron.bytescale.core.datasets.window_dataset import WindowSamples, window_config

DataSets = Sequence[object | None]
"""Training, validation and test data sets; None for a split without samples, or on a rank that reads no data."""
DatasetProvider = Callable[..., DataSets]
"""Megatron's ``train_valid_test_datasets_provider``: takes the samples of each split and a virtual stage."""
Batch = Mapping[str, torch.Tensor]
"""Tensors [b, s] of a micro-batch, by name."""
SumOfLosses = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Sum of the losses, number of labels, and the report of a micro-batch, by name."""
LossFunction = Callable[[torch.Tensor], SumOfLosses]
"""Loss function of per-token losses; Megatron's ``forward_step_func`` returns it with them."""
ForwardStep = Callable[..., tuple[torch.Tensor, LossFunction]]
"""Megatron's ``forward_step_func``: takes a data iterator and a model."""

SPIKE: Final = 10
"""Factor over the largest loss so far at which ``--check-for-spiky-loss`` reports, as in Megatron's own script."""


def dataset_config() -> GPTDatasetConfig:
    """Return the configuration of Megatron's GPTDataset, or of its fill-in-the-middle data set (``--fim-data``).

    Raises ValueError for an unreadable ``--per-dataset-sequences-path``.
    """
    data = current(SampleArguments)
    if not data.fim_data:
        return GPTDatasetConfig(**data.sample_settings())
    return GPTFIMDatasetConfig(**data.sample_settings(), **current(MiddleArguments).settings())


def dataset_provider(num_samples: Sequence[int | None], vp_stage: int | None = None) -> DataSets:
    """Build Megatron's fixed-length data sets; used as ``train_valid_test_datasets_provider``."""
    data = current(SampleArguments)
    kind = MockGPTDataset if data.mock_data else GPTFIMDataset if data.fim_data else GPTDataset
    return build_datasets(kind, num_samples, _is_first_of_tensor_group, dataset_config())


dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # the builder calls barriers on all ranks


def window_provider(run: RunConfig) -> DatasetProvider:
    """Return ``train_valid_test_datasets_provider`` for windows. Raises ValueError for bad data and empty splits."""
    data = current(DataArguments)
    for prefix in data.prefixes() if run.process.rank == 0 else []:
        check_token_ids(prefix, run.shape.vocab)
    config = window_config(run.get(SculptConfig), data.settings())
    check_splits(config, data.wanted_samples(), config.num_windows)

    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> DataSets:
        return build_datasets(WindowSamples, num_samples, _is_first_of_tensor_group, config.in_saved_order())

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def _is_first_of_tensor_group() -> bool:
    first_or_last = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_rank() == 0 and (num_stages == 1 or first_or_last)


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
    """Run one micro-batch of samples [b, s] through the model; used as Megatron's ``forward_step_func``."""
    batch = read_batch(data_iterator)
    labels, loss_mask = batch["labels"], batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels, loss_mask=loss_mask)
    return output, partial(mean_loss, loss_mask)


def read_batch(data_iterator: Iterator[Batch]) -> dict[str, torch.Tensor | None]:
    """Return the next micro-batch's tensors [b, s] by name; None for tensors that this pipeline stage does not need."""
    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    if not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        return dict.fromkeys(names)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, torch.Tensor | None] = {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        batch = {name: loaded[name].cuda(non_blocking=True) if name in loaded else None for name in names}
    sizes, num_stages = current(SampleBatches), parallel_state.get_pipeline_model_parallel_world_size()
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=sizes.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=sizes.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=sizes.micro_batch_size,
        seq_length=sizes.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=num_stages,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    cp_group = parallel_state.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group))


def mean_loss(loss_mask: torch.Tensor | None, losses: torch.Tensor) -> SumOfLosses:
    """Return (sum of losses, number of labels, report) of one micro-batch. ``loss_mask``, ``losses``: [b, s]."""
    assert loss_mask is not None, "only the last stage computes losses, and it reads masks"
    loss_mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * loss_mask)
    num_labels = loss_mask.sum().to(torch.int)
    checks, machine = current(LossChecks), get_rerun_state_machine()
    if checks.check_for_nan_in_loss_and_grad:
        for test, name in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            machine.validate_result(
                result=total, rejection_func=test, message=f"{name} loss", tolerance=0.0, fatal=True
            )
    if checks.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        machine.validate_result(result=total, rejection_func=is_spike, message="Spiky loss", tolerance=0.0, fatal=False)
    return total, num_labels, {"lm loss": torch.stack([total.detach(), num_labels.to(total.dtype)])}
