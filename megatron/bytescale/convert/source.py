"""Files of a Hugging Face folder other than its tensors, which a Megatron checkpoint keeps for the way back.

``bytescale convert --from hf`` copies them into the folder of checkpoints, and a training copies them from ``--load``
to ``--save``. ``bytescale convert --to hf`` writes them again: special tokens, generation settings, the tokenizer, the
chat template, and the vocabulary size without Megatron's padding.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = "hugging_face"  # in a folder of checkpoints
CONFIG: Final = "config.json"
_ENDINGS: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".bpe")
_WEIGHTS: Final = (".safetensors.index.json", ".bin.index.json")
_TEMPLATES: Final = "additional_chat_templates"


def copy_source(model: Path, target: Path) -> None:
    """Copy the files of a model's folder, except its tensors and code, to a new folder."""
    target.mkdir()
    add_source(model, target)


def add_source(model: Path, target: Path) -> None:
    """Copy the files of a model's folder, except its tensors and code, into a folder of our own.

    A folder of a stranger may hold devices, pipes, links to itself and links to private files of the user, which would
    be published with the model: only regular files of known names are copied, and no link out of ``_reach(model)``.

    Raises ValueError for such a link.
    """
    reach = _reach(model)
    for path in _files(model):
        if not (file := path.resolve()).is_relative_to(reach):
            raise ValueError(f"{path}: is a link out of its folder ({file}): copy the file, or remove the link")
        copy = target / path.relative_to(model)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _files(model: Path) -> Iterator[Path]:
    """Yield the files that describe a model, its tokenizer and its generation."""
    for path in sorted([*model.glob("*"), *model.glob(f"{_TEMPLATES}/*")]):
        if path.is_file() and path.name.endswith(_ENDINGS) and not path.name.endswith(_WEIGHTS):
            yield path


def _reach(model: Path) -> Path:
    """Return the folder that the links in a model's folder may lead to.

    The cache of Hugging Face has links in ``models--NAME/snapshots/REVISION`` to files in ``models--NAME/blobs``.
    """
    model = model.resolve()
    is_cached = model.parent.name == "snapshots" and model.parents[1].name.startswith("models--")
    return model.parents[1] if is_cached else model


def keep_source(load: Path | None, save: Path | None) -> None:
    """Copy the kept files of ``--load`` to ``--save``, unless it has some. One process calls it."""
    if load is None or save is None or not (load / FOLDER).is_dir() or (save / FOLDER).exists():
        return
    part = save / f".{FOLDER}.part"
    shutil.rmtree(part, ignore_errors=True)
    save.mkdir(parents=True, exist_ok=True)
    copy_source(load / FOLDER, part)
    part.rename(save / FOLDER)


def source_of(folders: Sequence[Path | None]) -> Path | None:
    """Return the first existing folder of kept files, or None.

    ``folders``: folders of checkpoints, and last the folder of a tokenizer, which may be the model's folder.
    """
    *checkpoints, tokenizer = folders
    kept = [folder / FOLDER for folder in checkpoints if folder is not None]
    places = [*kept, tokenizer] if tokenizer is not None else kept
    return next((place for place in places if (place / CONFIG).is_file()), None)
