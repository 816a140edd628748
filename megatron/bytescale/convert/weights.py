"""Reads the tensors of a Hugging Face folder as transformers does: from the files that the folder names, and no others.

``model.safetensors`` holds the whole model if it exists. Otherwise ``model.safetensors.index.json`` names the file of
each tensor. Other files of the folder (older shards, adapters, consolidated copies) are not opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from bytescale_ext.json_input import json_value, stored_text
from megatron.bytescale.convert.library import library

if TYPE_CHECKING:
    from safetensors import safe_open

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SIZES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_SHOWN = 4  # names in a message


class FolderWeights:
    """The tensors of a folder, by name.

    Args:
        source: folder of the model.
        opened: closes the files.

    Raises:
        ValueError: there are no safetensors, or the index or a file is damaged, or they contradict each other.
    """

    def __init__(self, source: Path, opened: ExitStack) -> None:
        self._source = source
        self._files: dict[str, safe_open] = {}
        self._read: set[str] = set()
        self._others: list[str] = []
        if (source / WHOLE).is_file():
            names = self._open(WHOLE, opened)
            self._places = dict.fromkeys(names, WHOLE)
        elif (source / INDEX).is_file():
            self._places = _weight_map(source / INDEX)
            self._check(opened)
        else:
            raise ValueError(f"--input {source}: there is neither {WHOLE} nor {INDEX}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum((self._source / file).stat().st_size for file in self._files)

    def check_sizes(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError for a configuration of a model that the folder's files cannot hold."""
        for name in SIZES:
            value = config.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"--input {self._source / 'config.json'}: {name} is {str(value)[:40]}")
        num_bytes = self.num_bytes
        layers, hidden, vocab = (config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
        if layers > len(self._places) or hidden * vocab > num_bytes:
            raise ValueError(
                f"--input {self._source}: {len(self._places)} tensors of {num_bytes:,} bytes cannot hold {layers:,} "
                f"layers and {vocab:,} tokens of {hidden:,} numbers"
            )

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor [...] by name. Raises ValueError if the model lacks it."""
        if name not in self._places:
            raise ValueError(f"--input {self._source}: the tensor {name} is missing")
        self._read.add(name)
        tensor: torch.Tensor = self._files[self._places[name]].get_tensor(name)
        return tensor

    def notes(self) -> list[str]:
        """Return one line for each kind of tensor that was not used: unknown to the model, or not in the index."""
        unused = sorted(set(self._places) - self._read)
        lines = [f"left out, because the model does not have them: {_some(unused)}"] if unused else []
        if self._others:
            lines.append(f"left out, because {INDEX} names other files for them: {_some(self._others)}")
        return lines

    def _open(self, file: str, opened: ExitStack) -> list[str]:
        """Open a file and return the names of its tensors."""
        path = self._source / file
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise ValueError(f"--input {path} is no file")
        try:
            self._files[file] = opened.enter_context(library("safetensors").safe_open(path, framework="pt"))
        except Exception as error:  # safetensors raises its own types for damaged files
            raise ValueError(f"--input {path}: {error}") from None
        return list(self._files[file].keys())

    def _check(self, opened: ExitStack) -> None:
        """Open the files of the index. Raises ValueError if one lacks a tensor that the index gives it."""
        for file in sorted(set(self._places.values())):
            inside = set(self._open(file, opened))
            missing = sorted(name for name, place in self._places.items() if place == file and name not in inside)
            if missing:
                raise ValueError(f"--input {self._source / file}: {INDEX} says that it holds {_some(missing)}")
            self._others += sorted(name for name in inside if self._places.get(name) != file)


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises ValueError for a damaged index and for files outside the folder."""
    try:
        places = json_value(stored_text(path), object_pairs_hook=_unique)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"--input {path}: {error if isinstance(error, ValueError) else 'no weight_map'}") from None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"--input {path}: weight_map is not a table of file names")
    for file in sorted(set(places.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise ValueError(f"--input {path}: {file!r} is not the name of a .safetensors file in the folder")
    return places


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict. Raises ValueError if a name stands twice."""
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ValueError(f"{_some(twice)} stands twice")
    return dict(pairs)


def _some(names: list[str]) -> str:
    """Return the first names, and how many follow."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
