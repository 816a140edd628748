"""Files that describe a Hugging Face model go with its checkpoints, without tensors and code."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.bytescale.convert.source import FOLDER, add_source, copy_source, keep_source, source_of

KEPT = ["config.json", "generation_config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"]
LEFT = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "modeling_own.py", "README.md"]


def test_descriptions_are_copied_and_tensors_are_not(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    for name in [*KEPT, *LEFT]:
        (model / name).write_text(name)
    copy_source(model, tmp_path / "copy")
    names = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*")}
    assert names == {*KEPT, "additional_chat_templates/tool_use.jinja"}


def test_a_training_passes_them_on(tmp_path: Path) -> None:
    load, save = tmp_path / "load", tmp_path / "save"
    keep_source(load, save)
    assert not save.exists()
    (load / FOLDER).mkdir(parents=True)
    (load / FOLDER / "config.json").write_text("{}")
    keep_source(load, save)
    assert (save / FOLDER / "config.json").read_text() == "{}"
    (load / FOLDER / "config.json").write_text("[]")
    keep_source(load, save)
    keep_source(load, None)
    assert (save / FOLDER / "config.json").read_text() == "{}"
    assert source_of([save, load, None]) == save / FOLDER
    assert source_of([tmp_path, None, None]) is None
    (tmp_path / "config.json").write_text("{}")
    assert source_of([None, None, tmp_path]) == tmp_path


def test_devices_pipes_and_links_to_the_folder_itself_are_not_copied(tmp_path: Path) -> None:
    """Two links to their own folder have 2^40 paths, and /dev/zero has no end."""
    kept = tmp_path / "load" / FOLDER
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    for name, target in {"a": ".", "b": ".", "zero.json": "/dev/zero", "none.json": "nowhere"}.items():
        (kept / name).symlink_to(target)
    (kept / "additional_chat_templates").symlink_to("/dev")
    (kept / "code.py").write_text("x")
    os.mkfifo(kept / "pipe.json")
    keep_source(tmp_path / "load", tmp_path / "save")
    (tmp_path / "model").mkdir()
    add_source(kept, tmp_path / "model")
    for folder in (tmp_path / "save" / FOLDER, tmp_path / "model"):
        assert [path.name for path in folder.iterdir()] == ["config.json"]
