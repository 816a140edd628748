"""Files that others have planted links for: targets of links stay as they are."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from bytescale_ext.new_file import (
    appended,
    check_writable_folder,
    make_folder,
    make_own_folder,
    new_file,
    new_log,
    overwritten,
    private_folder,
    write_text,
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file of the victim, to which ``link`` in the same folder leads."""
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    return target


def test_a_link_is_replaced_and_its_target_stays(target: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    write_text(link, "new\u2028")
    assert link.read_text("utf-8") == "new\u2028"
    assert not link.is_symlink()
    link.unlink()
    link.symlink_to(target)
    with new_log(link) as log:
        log.write("line")
    assert link.read_text() == "line"
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic links|Too many"):
        appended(link)
    with pytest.raises(OSError, match=r"symbolic links|Too many"):
        overwritten(link)
    assert target.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link"}


def test_a_file_is_whole_or_old(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(TypeError), new_file(path) as file:
        file.writelines(["half", 1])
    assert path.read_text() == "old"
    with new_file(path, is_binary=True) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=str(tmp_path / "none" / "file")):
        write_text(tmp_path / "none" / "file", "")


def test_the_mode_is_the_users(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_pipes_are_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(60)
    assert read == ["text"]
    with pytest.raises(OSError, match=r"pipe|No such device"):  # without a reader it would wait for ever
        appended(pipe)


def test_appended_lines_follow_each_other(tmp_path: Path) -> None:
    for line in ("one\n", "two\n"):
        with appended(tmp_path / "log") as file:
            file.write(line)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_private_folder_is_removed(tmp_path: Path) -> None:
    with private_folder(tmp_path, "name") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("")
    with pytest.raises(ZeroDivisionError), private_folder(tmp_path, "name"):
        print(1 / 0)
    check_writable_folder(tmp_path / "new" / "deep")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "new"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    full = "No space left on device: "
    for is_binary, content in ((False, "x"), (True, b"x")):
        with pytest.raises(OSError, match=f"{full}'/dev/full'"), new_file("/dev/full", is_binary) as file:
            file.write(content)
    with pytest.raises(OSError, match=f"{full}'{tmp_path}/x'"), private_folder(tmp_path, "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"^other$"), private_folder(tmp_path, "x"):
        raise OSError("other")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "other")  # the user named it
    make_folder(tmp_path / "logs" / "timeline" / "stage0", tmp_path / "logs")
    make_folder(tmp_path / "logs", tmp_path / "logs")
    (tmp_path / "other" / "links").symlink_to(tmp_path / "other" / "timeline")
    with pytest.raises(OSError, match=r"is a link: .*links"):
        make_folder(tmp_path / "logs" / "links" / "stage1", tmp_path / "logs")
    assert sorted(path.name for path in (tmp_path / "other" / "timeline").iterdir()) == ["stage0"]


@pytest.mark.parametrize("link", ["", "link", "logs/link"])
def test_an_own_folder_has_no_links(link: str, tmp_path: Path) -> None:
    """Other programs open their files in it by name."""
    folder = tmp_path / "new" / "work"
    make_own_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "logs").mkdir()
    folder.chmod(0o777)
    make_own_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    if link:
        (folder / link).symlink_to(tmp_path)
    else:
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=f"is a link: '{folder / link}'"):
        make_own_folder(folder)


def test_the_folder_of_another_user_is_not_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.stat_result((0, 0, 0, 0, os.geteuid() + 1, 0, 0, 0, 0, 0))
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open(dir / "new", "wb"))
    monkeypatch.setattr("os.fstat", lambda file: status)
    with pytest.raises(OSError, match="belongs to another user"):
        make_own_folder(tmp_path)
