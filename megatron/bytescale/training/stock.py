"""Training as Megatron ships it: samples of one length from its GPTDataset. Features build on this path."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.global_vars import get_tokenizer
from megatron.training.training import get_train_valid_test_num_samples
from megatron.training.utils import get_blend_and_blend_per_split

from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.data.samples.lengths import check_token_ids
from megatron.bytescale.arguments.bad_input import refusals_of_megatron
from megatron.bytescale.core.datasets.document_dataset import check_splits
from megatron.bytescale.core.datasets.window_dataset import WindowSamples, window_config

SPIKE: Final = 10
"""``--check-for-spiky-loss`` reports a loss this many times the largest so far, as Megatron's own script does."""


def data_prefixes(args: Any) -> list[str]:
    """Return the data sets of all splits. Raises ValueError for flags that Megatron refuses."""
    with refusals_of_megatron():
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    return [prefix for part in blend_per_split or [blend] if part is not None for prefix in part[0]]


def data_settings(args: Any) -> dict[str, Any]:
    """Return fields of a data set's configuration: which data sets there are and how they are split."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
    }


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Return the configuration of Megatron's GPTDataset, or of its data set of middles (``--fim-data``).

    Raises ValueError for a file of ``--per-dataset-sequences-path`` that cannot be read.
    """
    settings = data_settings(args) | {
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    if args.per_dataset_sequences_path is not None:
        settings["sequences_per_dataset"] = json.loads(Path(args.per_dataset_sequences_path).read_text("utf-8"))
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    names = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix")
    tokens = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    return GPTFIMDatasetConfig(**settings, **{name: getattr(args, name) for name in names}, fim_extra_tokens=tokens)


def dataset_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
    """``train_valid_test_datasets_provider`` over Megatron's data sets of samples of one length."""
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTFIMDataset if args.fim_data else GPTDataset
    on_rank = partial(_is_first_of_tensor_group, args.pipeline_model_parallel_size)
    return BlendedMegatronDatasetBuilder(kind, num_samples, on_rank, dataset_config(args)).build()


dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # the builder has barriers for all ranks


def window_provider(windows: SculptConfig) -> Callable[..., Any]:
    """Return ``train_valid_test_datasets_provider`` over windows. Raises ValueError for bad data and empty splits."""
    args = get_args()
    for prefix in data_prefixes(args) if args.rank == 0 else []:
        check_token_ids(prefix, args.padded_vocab_size)
    config = window_config(windows, data_settings(args))
    check_splits(config, wanted_samples(args), config.num_windows)

    def provide(num_samples: Any, vp_stage: int | None = None) -> Any:
        on_rank = partial(_is_first_of_tensor_group, args.pipeline_model_parallel_size)
        return BlendedMegatronDatasetBuilder(WindowSamples, num_samples, on_rank, config).build()

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def wanted_samples(args: Any) -> tuple[int | None, ...]:
    """Return the samples of the three splits, where they are known before Megatron has counted iterations."""
    if args.train_iters is None:
        return args.train_samples, args.eval_iters, args.eval_iters
    sizes: tuple[int | None, ...] = get_train_valid_test_num_samples()
    return sizes


def _is_first_of_tensor_group(num_stages: int) -> bool:
    first_or_last = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    return parallel_state.get_tensor_model_parallel_rank() == 0 and (num_stages == 1 or first_or_last)


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch of samples [b, s] through the model, as Megatron's ``forward_step_func``."""
    batch = read_batch(data_iterator)
    labels, loss_mask = batch["labels"], batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels, loss_mask=loss_mask)
    return output, partial(mean_loss, loss_mask)


def read_batch(data_iterator: Any) -> dict[str, Any]:
    """Return tensors [b, s] of the next micro-batch by name; None for what this pipeline stage does not need."""
    args = get_args()
    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    if not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        return dict.fromkeys(names)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        batch = {name: loaded[name].cuda(non_blocking=True) if name in loaded else None for name in names}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    cp_group = parallel_state.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group))


def mean_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return (sum of the losses, number of labels, report) of one micro-batch; masks and losses [b, s]."""
    loss_mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * loss_mask)
    num_labels = loss_mask.sum().to(torch.int)
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for test, name in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            machine.validate_result(
                result=total, rejection_func=test, message=f"{name} loss", tolerance=0.0, fatal=True
            )
    if args.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        machine.validate_result(result=total, rejection_func=is_spike, message="Spiky loss", tolerance=0.0, fatal=False)
    return total, num_labels, {"lm loss": torch.stack([total.detach(), num_labels.to(total.dtype)])}
