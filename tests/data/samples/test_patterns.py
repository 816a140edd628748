"""Patterns of files: what glob and rglob find, and an end in folders whose links lead back to them."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from bytescale_ext.data.samples import patterns
from bytescale_ext.data.samples.patterns import paths_below, paths_matching

PATTERNS = (
    "*",
    "*/*",
    "**",
    "**/*",
    "a/**/*.x",
    "**/b/*",
    ".*",
    ".*/*",
    "a/[bc].x",
    "no/*",
    "a",
    "a/b/../*",
    "**/**/*",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a/b/c.x", "a/b.x", "a/.hidden/d.x", ".dots/e.x", "f.x", "a b/[g].x"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "tree"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_finds_what_the_standard_library_finds(pattern: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sorted(map(Path, set(glob.glob(f"{tree}/{pattern}", recursive=True))))
    assert paths_matching(f"{tree}/{pattern}") == wanted
    files = sorted(path for path in tree.rglob(pattern) if path.is_file())
    assert [path for path in paths_below(tree, pattern) if path.is_file()] == files or pattern.endswith("**")
    monkeypatch.chdir(tree)
    assert paths_matching(pattern) == sorted({Path(path) for path in glob.glob(pattern, recursive=True) if path})


@pytest.mark.parametrize("pattern", ["/*", "", "."])
def test_a_pattern_below_a_folder_is_relative(pattern: str, tree: Path) -> None:
    with pytest.raises(ValueError, match="is no pattern for the files below a folder"):
        paths_below(tree, pattern)


@pytest.mark.parametrize("pattern", ["/*" * 30, "/**", "/**/x/**", "/*" * 30 + "/none"])
@pytest.mark.slow
def test_links_to_a_folder_further_up_come_to_an_end(pattern: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MOST_LINKED", 10_000)
    for name in ("up", "again"):
        (tree / name).symlink_to(tree)
    with pytest.raises(ValueError, match="leads to more than 10,000 files behind links"):
        paths_matching(f"{tree}{pattern}")
    assert tree / "f.x" in paths_below(tree, "**/**/**/*")
