"""Files that describe a Hugging Face model go with its checkpoints, without tensors and code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
    links = {"a": ".", "b": ".", "zero.json": "/dev/zero", "none.json": "nowhere"}
    for name, target in links.items():
        (kept / name).symlink_to(target)
    (kept / "additional_chat_templates").symlink_to("/dev")
    (kept / "code.py").write_text("x")
    os.mkfifo(kept / "pipe.json")
    keep_source(tmp_path / "load", tmp_path / "save")
    (tmp_path / "model").mkdir()
    add_source(kept, tmp_path / "model")
    for folder in (tmp_path / "save" / FOLDER, tmp_path / "model"):
        assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("target", ["{root}/private", "../../private", "{root}/load/link"])
def test_links_to_private_files_are_refused(target: str, tmp_path: Path) -> None:
    """A copy of the target would be published with the model."""
    (tmp_path / "private").write_text("a key")
    kept = tmp_path / "load" / FOLDER
    kept.mkdir(parents=True)
    (tmp_path / "load" / "link").symlink_to(tmp_path / "private")
    (kept / "vocab.txt").symlink_to(target.format(root=tmp_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"vocab\.txt: is a link out of its folder \(.*private\)"):
        add_source(kept, tmp_path / "model")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        keep_source(tmp_path / "load", tmp_path / "save")
    assert not list((tmp_path / "model").iterdir())
    assert not (tmp_path / "save" / FOLDER).exists()


def test_links_inside_a_model_and_in_the_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--someone--model"
    snapshot = cache / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "56ab").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/56ab")
    (snapshot / "tokenizer.json").symlink_to("config.json")
    (tmp_path / "short").symlink_to(snapshot)
    for number, model in enumerate((snapshot, tmp_path / "short")):
        copy_source(model, tmp_path / f"copy {number}")
        copies = list((tmp_path / f"copy {number}").iterdir())
        assert sorted(path.name for path in copies) == ["config.json", "tokenizer.json"]
        assert not any(path.is_symlink() for path in copies)
