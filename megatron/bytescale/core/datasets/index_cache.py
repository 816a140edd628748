"""Cached indexes of Megatron's data sets. A data set may come from a stranger, and its cache with it.

Megatron reads a cached index with ``numpy.load(allow_pickle=True)``, which runs the code of a file that is a pickle
instead of an array. Arrays are safe: Megatron maps them into memory, and numpy maps no array of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

_ARRAY = b"\x93NUMPY"


def build_datasets(
    kind: type, sizes: Sequence[int | None], is_built_on_rank: Callable[[], bool], config: BlendedMegatronDatasetConfig
) -> Sequence[Any]:
    """Return the data sets of each split from Megatron's builder, after a check of its cached indexes.

    Collective if ``torch.distributed`` is initialised, as Megatron's builder is; for the arguments see there.

    Raises ValueError for a cached index that is not an array.
    """
    check_index_caches(config)
    datasets: Sequence[Any] = BlendedMegatronDatasetBuilder(kind, list(sizes), is_built_on_rank, config).build()
    return datasets


def check_index_caches(config: BlendedMegatronDatasetConfig) -> None:
    """Raise ValueError if a cached index is not an array, or a link: Megatron writes missing indexes in place.

    A file may be empty, or end in the first bytes of an array: another rank or job is writing it.
    """
    for folder in dict.fromkeys(_folders(config)):
        for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if file.is_symlink():
                raise ValueError(f"{file} is a link, whose target Megatron could overwrite: delete it")
            if file.suffix != ".npy":
                continue
            if not file.is_file():  # opening a pipe could wait for ever
                raise ValueError(f"{file} is no file: delete it")
            with file.open("rb") as stream:
                if not _ARRAY.startswith(stream.read(len(_ARRAY))):
                    raise ValueError(f"{file}: not an array, and Megatron would run a pickle: delete this folder")


def _folders(config: BlendedMegatronDatasetConfig) -> Iterator[Path]:
    """Yield the folders of cached indexes."""
    if config.path_to_cache is not None:
        yield Path(config.path_to_cache)
        return
    for blend in (config.blend, *(config.blend_per_split or ())):
        for prefix in (blend or ((), None))[0]:
            yield Path(prefix) / "cache"
