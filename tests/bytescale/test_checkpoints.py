"""Signs of an incomplete checkpoint, and the checkpoint of a resumed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.bytescale.checkpoints import flaw_of, names_in, to_load, use_last_whole
from megatron.bytescale.launch import TRACKER


def legacy(load: Path, iteration: int) -> Path:
    file = load / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"weight": torch.arange(1000.0)}, file)
    return file


def sharded(load: Path, iteration: int) -> Path:
    """Write a checkpoint in torch.distributed's format, with the file that Megatron adds at the end."""
    folder = load / f"iter_{iteration:07d}"
    dcp.save({"weight": torch.arange(1000.0)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return next(folder.glob("*.distcp"))


def cut(file: Path, size: int) -> None:
    with file.open("rb+") as opened:
        opened.truncate(size)


@pytest.mark.parametrize("make", [legacy, sharded])
def test_the_last_whole_checkpoint_takes_the_place_of_one_that_is_cut_short(
    make: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    for iteration in (2, 4, 10):
        file = make(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("10")
    assert use_last_whole(tmp_path) is None
    cut(file, file.stat().st_size - 1)
    warning = use_last_whole(tmp_path)
    assert warning is not None
    assert str(file) in warning
    assert "resumes from the last whole checkpoint, of iteration 4" in warning
    assert (tmp_path / TRACKER).read_text() == "4"
    assert use_last_whole(tmp_path) is None


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_files_that_describe_shards_are_looked_at_too(name: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2).parent
    assert flaw_of(tmp_path, 2) == ""
    cut(folder / name, 10)
    assert name in flaw_of(tmp_path, 2)
    (folder / name).unlink()
    assert name in flaw_of(tmp_path, 2)


def test_an_empty_tracker_file_is_no_reason_to_stop(tmp_path: Path) -> None:
    """Without the check, Megatron would exit with code 0."""
    for iteration in (2, 4):
        legacy(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("")
    warning = use_last_whole(tmp_path)
    assert warning is not None
    assert "names no iteration" in warning
    assert (tmp_path / TRACKER).read_text() == "4"


def test_a_later_checkpoint_than_the_named_one_was_not_finished(tmp_path: Path) -> None:
    cut(legacy(tmp_path, 4), 100)
    legacy(tmp_path, 2)
    legacy(tmp_path, 6)
    (tmp_path / TRACKER).write_text("4")
    use_last_whole(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "2"


def test_refused_in_one_line_where_no_checkpoint_will_do(tmp_path: Path) -> None:
    file = legacy(tmp_path, 2)
    cut(file, 100)
    (tmp_path / TRACKER).write_text("2")
    with pytest.raises(
        ValueError, match=f"--load {tmp_path}: {file} is cut short, and no checkpoint before it is whole"
    ):
        use_last_whole(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "2"


def test_the_wanted_step_has_to_be_whole(tmp_path: Path) -> None:
    for iteration in (2, 4):
        file = legacy(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("4")
    assert use_last_whole(tmp_path, wanted=2) is None
    cut(file, 100)
    with pytest.raises(ValueError, match=f"--ckpt-step 4: {file} is cut short; whole in {tmp_path}: 2"):
        use_last_whole(tmp_path, wanted=4)
    with pytest.raises(ValueError, match=r"--ckpt-step 6: .*iter_0000006 holds no checkpoint; whole in"):
        use_last_whole(tmp_path, wanted=6)


def test_which_checkpoint_megatron_loads(tmp_path: Path) -> None:
    assert to_load(tmp_path) is None
    file = sharded(tmp_path, 5)
    assert to_load(tmp_path) is None  # no tracker file
    (tmp_path / TRACKER).write_text("5\n")
    assert to_load(tmp_path) == to_load(tmp_path, 5) == file.parent
    assert to_load(tmp_path, 6) is None
    (tmp_path / "release").mkdir()
    (tmp_path / TRACKER).write_text("release")
    assert to_load(tmp_path) == tmp_path / "release"
    assert names_in(file.parent) == ["weight"]
    (file.parent / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        names_in(file.parent)


def test_checkpoints_without_a_tracker_file_are_named(tmp_path: Path) -> None:
    legacy(tmp_path, 4)
    cut(legacy(tmp_path, 6), 100)
    warning = use_last_whole(tmp_path)
    assert warning is not None
    assert f"holds checkpoints (4) and no {TRACKER}: the run starts anew; write 4 into that file" in warning
    assert not (tmp_path / TRACKER).exists()
    assert use_last_whole(tmp_path / "new") is None
