"""The data sets of a training, from Megatron's flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bytescale_ext.data.samples.blends import BlendShares
from bytescale_ext.data.samples.document_samples import open_samples
from bytescale_ext.json_input import json_settings, stored_text
from megatron.bytescale.arguments.bad_input import refusals_of_megatron

Blend = tuple[list[str], list[float] | None]
"""Data sets and their weights, in the format of Megatron's configuration of data sets."""


@dataclass(frozen=True)
class DataPaths:
    """The locations of the data sets, from Megatron's flags of the same names.

    Attributes:
        data_path: data sets of all splits, with their weights.
        data_args_path: file that contains such a list.
        train_data_path, valid_data_path, test_data_path: data sets of one split.
        per_split_data_args_path: JSON file with the data sets of each split.
    """

    data_path: Sequence[str] | None
    data_args_path: str | None
    train_data_path: Sequence[str] | None
    valid_data_path: Sequence[str] | None
    test_data_path: Sequence[str] | None
    per_split_data_args_path: str | None

    def blends(self) -> tuple[Blend | None, list[Blend | None] | None]:
        """Return the data sets for all splits together, or the data sets of each split."""
        from megatron.training.utils import get_blend_and_blend_per_split  # imports torch

        together, of_splits = get_blend_and_blend_per_split(self)  # it reads only these six arguments
        return together, of_splits

    def prefixes(self) -> list[str]:
        """Return the data sets of all splits. Raises ValueError for flags that Megatron refuses, and for files."""
        with refusals_of_megatron():
            together, of_splits = self.blends()
        prefixes = [prefix for part in of_splits or [together] if part is not None for prefix in part[0]]
        for prefix in prefixes:
            stem, ending = os.path.splitext(prefix)
            if ending in (".idx", ".bin") and os.path.exists(f"{stem}.idx"):
                raise ValueError(f"data set {prefix}: leave {ending} away, give {stem}")
        return prefixes


@dataclass(frozen=True, kw_only=True)
class DataArguments(DataPaths):
    """The settings for reading data sets, from Megatron's flags of the same names.

    Attributes:
        seed: seed of the order of samples.
        seq_length: maximum number of tokens in a sample.
        split: shares of training, validation and test.
        num_dataset_builder_threads: number of threads that build data sets.
        mid_level_dataset_surplus: share of extra samples that are built, for the rounding of blends.
        data_cache_path: folder of the index cache.
        mmap_bin_files: whether token files are mapped into memory.
        train_iters: number of training steps; None if training is counted in samples.
        train_samples: number of training samples.
        eval_iters: number of steps of an evaluation.
        skip_train: whether the run only evaluates.
        hdp_blend_by: whether weights of a blend are shares of "documents" or of "tokens".
        trains_on_answers: whether samples are conversations, whose end is cut at ``seq_length``.
    """

    seed: int
    seq_length: int
    split: str | None
    num_dataset_builder_threads: int
    mid_level_dataset_surplus: float
    data_cache_path: Path | None
    mmap_bin_files: bool
    train_iters: int | None
    train_samples: int | None
    eval_iters: int
    skip_train: bool = False
    hdp_blend_by: str = "documents"
    trains_on_answers: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the fields of a configuration of data sets (``BlendedMegatronDatasetConfig``) by name."""
        from megatron.training.global_vars import get_tokenizer  # imports torch

        blend, blend_per_split = self.blends()
        if self.hdp_blend_by == "tokens":
            blend = self._by_tokens(blend)
            blend_per_split = None if blend_per_split is None else [self._by_tokens(part) for part in blend_per_split]
        return {
            "random_seed": self.seed,
            "sequence_length": self.seq_length,
            "blend": blend,
            "blend_per_split": blend_per_split,
            "split": self.split,
            "num_dataset_builder_threads": self.num_dataset_builder_threads,
            "mid_level_dataset_surplus": self.mid_level_dataset_surplus,
            "path_to_cache": self.data_cache_path,
            "mmap_bin_files": self.mmap_bin_files,
            "tokenizer": get_tokenizer(),
        }

    def shares(self, blend: Blend | None) -> BlendShares | None:
        """Return the shares of a blend; None without weights. Raises ValueError for a damaged index."""
        if blend is None or blend[1] is None:
            return None
        tokens = [
            mean_tokens(prefix, self.seq_length, self.trains_on_answers, self.data_cache_path) for prefix in blend[0]
        ]
        return BlendShares(tuple(blend[0]), tuple(blend[1]), tuple(tokens))

    def _by_tokens(self, blend: Blend | None) -> Blend | None:
        """Return a blend whose weights count documents, from one whose weights are shares of tokens."""
        shares = self.shares(blend)
        return blend if shares is None else (list(shares.prefixes), list(shares.token_weights))

    def wanted_samples(self) -> tuple[int | None, ...]:
        """Return the number of samples of each split; None for a number that depends on Megatron's later counts."""
        if self.train_iters is None:
            return self.train_samples, self.eval_iters, self.eval_iters
        from megatron.training.training import get_train_valid_test_num_samples  # imports torch

        sizes: tuple[int | None, ...] = get_train_valid_test_num_samples()
        return sizes


@cache
def mean_tokens(prefix: str, seq_length: int, are_cut: bool, cache_folder: Path | None) -> float:
    """Return the tokens of the mean sample of a data set.

    ``are_cut``: whether a document beyond ``seq_length`` loses its end (conversations) or becomes several samples.
    """
    samples = open_samples(prefix, seq_length, cache_folder)
    return samples.mean_tokens_of_first if are_cut else samples.num_tokens / len(samples)


@dataclass(frozen=True, kw_only=True)
class SampleArguments(DataArguments):
    """The settings of Megatron's fixed-length samples, from its flags of the same names."""

    multiple_validation_sets: bool
    full_validation: bool
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask_in_dataloader: bool
    object_storage_cache_path: str | None
    allow_ambiguous_pad_tokens: bool
    dataloader_fast_cache_load: bool
    dataloader_defer_npy_index_mmap: bool
    context_parallel_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    sequence_parallel: bool
    per_dataset_sequences_path: str | None
    fim_data: bool
    mock_data: bool

    def sample_settings(self) -> dict[str, Any]:
        """Return the fields of Megatron's ``GPTDatasetConfig`` by name.

        Raises ValueError for an unreadable ``--per-dataset-sequences-path``.
        """
        settings = self.settings() | {
            "multiple_validation_sets": self.multiple_validation_sets,
            "full_validation": self.full_validation,
            "reset_position_ids": self.reset_position_ids,
            "reset_attention_mask": self.reset_attention_mask,
            "eod_mask_loss": self.eod_mask_loss,
            "create_attention_mask": self.create_attention_mask_in_dataloader,
            "object_storage_cache_path": self.object_storage_cache_path,
            "allow_ambiguous_pad_tokens": self.allow_ambiguous_pad_tokens,
            "fast_cache_load": self.dataloader_fast_cache_load,
            "defer_npy_index_mmap": self.dataloader_defer_npy_index_mmap,
            "context_parallel_size": self.context_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "sequence_parallel_size": self.tensor_model_parallel_size * self.sequence_parallel,
        }
        if self.per_dataset_sequences_path is not None:
            settings["sequences_per_dataset"] = json_settings(stored_text(self.per_dataset_sequences_path))
        return settings


@dataclass(frozen=True)
class MiddleArguments:
    """The rearrangement of samples that teaches a model to fill in the middle (``--fim-data``)."""

    fim_rate: float | None
    fim_spm_rate: float | None
    fim_split_sample: str | None
    fim_fragment_rate: float | None
    fim_no_prefix: str | None
    fim_prefix_token: str
    fim_middle_token: str
    fim_suffix_token: str
    fim_pad_token: str
    fim_eod_token: str

    def settings(self) -> dict[str, Any]:
        """Return the fields that Megatron's ``GPTFIMDatasetConfig`` has in addition to ``GPTDatasetConfig``."""
        return {
            "fim_rate": self.fim_rate,
            "fim_spm_rate": self.fim_spm_rate,
            "fim_split_sample": self.fim_split_sample,
            "fim_fragment_rate": self.fim_fragment_rate,
            "fim_no_prefix": self.fim_no_prefix,
            "fim_extra_tokens": {
                "prefix": self.fim_prefix_token,
                "middle": self.fim_middle_token,
                "suffix": self.fim_suffix_token,
                "pad": self.fim_pad_token,
                "eod": self.fim_eod_token,
            },
        }
