"""The data sets of a training, from Megatron's flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.bytescale.arguments.bad_input import refusals_of_megatron

Blend = tuple[list[str], list[float] | None]
"""Data sets and their weights, as Megatron's configuration of data sets holds them."""


@dataclass(frozen=True)
class DataPaths:
    """Where the data sets are; Megatron's flags of the same names.

    Attributes:
        data_path: data sets of all splits, with their weights.
        data_args_path: a file of such a list.
        train_data_path, valid_data_path, test_data_path: data sets of one split.
        per_split_data_args_path: a JSON file with the data sets of each split.
    """

    data_path: Sequence[str] | None
    data_args_path: str | None
    train_data_path: Sequence[str] | None
    valid_data_path: Sequence[str] | None
    test_data_path: Sequence[str] | None
    per_split_data_args_path: str | None

    def blends(self) -> tuple[Blend | None, list[Blend | None] | None]:
        """Return the data sets of all splits together, or those of each split."""
        from megatron.training.utils import get_blend_and_blend_per_split  # with torch

        together, of_splits = get_blend_and_blend_per_split(self)  # which reads these six arguments alone
        return together, of_splits

    def prefixes(self) -> list[str]:
        """Return the data sets of all splits. Raises ValueError for flags that Megatron refuses."""
        with refusals_of_megatron():
            together, of_splits = self.blends()
        return [prefix for part in of_splits or [together] if part is not None for prefix in part[0]]


@dataclass(frozen=True)
class DataArguments(DataPaths):
    """How data sets are read; Megatron's flags of the same names.

    Attributes:
        seed: seed of the order of samples.
        seq_length: most tokens of a sample.
        split: shares of training, validation and test.
        num_dataset_builder_threads: threads that build data sets.
        mid_level_dataset_surplus: share of samples that are built in addition, for rounding of blends.
        data_cache_path: folder of the index cache.
        mmap_bin_files: files of tokens are mapped into memory.
    """

    seed: int
    seq_length: int
    split: str | None
    num_dataset_builder_threads: int
    mid_level_dataset_surplus: float
    data_cache_path: Path | None
    mmap_bin_files: bool

    def settings(self) -> dict[str, object]:
        """Return fields of a configuration of data sets (``BlendedMegatronDatasetConfig``) by name."""
        from megatron.training.global_vars import get_tokenizer  # with torch

        blend, blend_per_split = self.blends()
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
