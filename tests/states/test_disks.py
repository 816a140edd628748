"""Detection of local disks, and their free space."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from bytescale_ext.plan.states.tiers import FileLayout
from bytescale_ext.states import disks
from bytescale_ext.states.disks import check_disk, file_system_of, free_disk_bytes
from bytescale_ext.states.page_file import PageFile, page_file_path

LAYOUT = FileLayout(2, 2, 4096)


def mount(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Make a folder the root of a file system of some kind."""
    mounts, name = folder.with_name(f"mounts of {folder.name}"), str(folder).replace(" ", r"\040")
    mounts.write_text(f"/dev/sda1 / ext4 rw,relatime 0 0\nsource {name} {kind} rw 0 0\n")
    monkeypatch.setattr(disks, "MOUNTS", mounts)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "fuse.fuse-overlayfs", "fuseblk", "made-up"])
def test_local_disks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, tmp_path, kind)
    (tmp_path / "below").mkdir()
    assert file_system_of(tmp_path / "below") == kind
    assert file_system_of(tmp_path.parent) == "ext4"
    check_disk(tmp_path / "below", 0, "--flag")


def test_a_folder_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local disk").mkdir()
    mount(monkeypatch, tmp_path / "local disk", "xfs")
    assert file_system_of(tmp_path / "local disk") == "xfs"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tmpfs", "is tmpfs, which is host memory: give a folder on a local disk"),
        ("nfs4", "is on nfs4, a network file system"),
        ("lustre", "is on lustre, a network file system"),
        ("fuse.sshfs", "is on fuse.sshfs, a network file system"),
    ],
)
def test_what_is_no_local_disk(kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, tmp_path, kind)
    with pytest.raises(ValueError, match=f"^--flag {tmp_path} {message}"):
        check_disk(tmp_path, 0, "--flag")


def test_only_files_of_this_rank_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, tmp_path, "ext4")
    used = PageFile(page_file_path(tmp_path, 1, 1), LAYOUT)
    check_disk(tmp_path, 0, "--flag")
    with pytest.raises(ValueError, match=r"rank-00001-part-1\.pages is in use by another run"):
        check_disk(tmp_path, 1, "--flag")
    used.close()
    check_disk(tmp_path, 1, "--flag")
    page_file_path(tmp_path, 0, 0).write_text("something else")
    with pytest.raises(ValueError, match="is not a page file"):
        check_disk(tmp_path, 0, "--flag")


def test_pages_of_dead_runs_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    used = PageFile(page_file_path(tmp_path, 0, 0), LAYOUT)
    assert free_disk_bytes(tmp_path) == 1000
    left = used.path.read_bytes()
    used.close()
    page_file_path(tmp_path, 5, 0).write_bytes(left)
    assert free_disk_bytes(tmp_path) == 1000 + LAYOUT.num_bytes
