from __future__ import annotations

import os
import pickle
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.bytescale.core.datasets.index_cache import check_index_caches


class Payload:
    """Object whose unpickling writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("place", ["beside the data", "of a split", "--data-cache-path"])
def test_a_cached_index_that_is_a_pickle_is_refused(place: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "docs")
    config: Any = SimpleNamespace(path_to_cache=None, blend=([prefix], None), blend_per_split=None)
    folder = tmp_path / "docs" / "cache" / "GPTDataset_indices"
    if place == "of a split":
        config.blend, config.blend_per_split = None, [None, ([prefix], None), None]
    elif place == "--data-cache-path":
        folder = tmp_path / "cache"
        config.path_to_cache = str(folder)
    check_index_caches(config)
    folder.mkdir(parents=True)
    np.save(folder / "a-document_index.npy", np.arange(3))
    check_index_caches(config)
    run = tmp_path / "run"
    (folder / "b-shuffle_index.npy").write_bytes(pickle.dumps(Payload(run)))
    with pytest.raises(ValueError, match=r"b-shuffle_index\.npy: not an array"):
        check_index_caches(config)
    assert not run.exists()
    np.save(folder / "c.npy", np.array([Payload(run)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):  # an array of objects is not mapped
        np.load(folder / "c.npy", allow_pickle=True, mmap_mode="r")


@pytest.mark.parametrize("name", ["a-document_index.npy", "a-description.txt", "sub"])
def test_links_that_megatron_could_write_through_are_refused(name: str, tmp_path: Path) -> None:
    """Megatron writes missing indexes in place, so the target of a link would be created or overwritten."""
    config: Any = SimpleNamespace(path_to_cache=str(tmp_path / "cache"), blend=None, blend_per_split=None)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).symlink_to(tmp_path / "missing")
    with pytest.raises(ValueError, match=f"{name} is a link"):
        check_index_caches(config)


def test_a_pipe_is_no_index(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(path_to_cache=str(tmp_path), blend=None, blend_per_split=None)
    os.mkfifo(tmp_path / "a-document_index.npy")
    with pytest.raises(ValueError, match="is no file"):
        check_index_caches(config)


def test_an_index_that_is_being_written_is_no_pickle(tmp_path: Path) -> None:
    """The first rank may write an index while other ranks check it. If only they refused it, the first would hang."""
    written = BytesIO()
    np.save(written, np.arange(3))
    whole, file = written.getvalue(), tmp_path / "a-document_index.npy"
    config: Any = SimpleNamespace(path_to_cache=str(tmp_path), blend=None, blend_per_split=None)
    sizes_read = []
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        check_index_caches(config)
        with suppress(ValueError, EOFError, pickle.UnpicklingError):
            assert np.load(file, allow_pickle=True, mmap_mode="r").tolist() == [0, 1, 2]
            sizes_read.append(size)
    assert sizes_read == [len(whole)]
