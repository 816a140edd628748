"""Documents of code repositories: the files of one repository, each after the files that it needs.

BaichuanSEED (arXiv 2408.15079) joins the files of a repository in the order of their dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from bytescale_ext.data.samples.sources import shown_files

_PYTHON_FILES: Final = (".py", ".pyi")
_C_FILES: Final = (".c", ".cc", ".cpp", ".cxx", ".cu", ".h", ".hh", ".hpp", ".cuh")
_SCRIPTS: Final = (".ts", ".tsx", ".js", ".jsx", ".mjs", ".vue")
_JVM_FILES: Final = (".java", ".kt", ".scala")
SUFFIXES: Final = (*_PYTHON_FILES, *_C_FILES, *_SCRIPTS, *_JVM_FILES, ".rs", ".go", ".cs", ".swift")
"""Suffixes of the files of a repository that are read. The order of the last three is by path."""

_PYTHON: Final = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+([\w., \t*()]+)|import[ \t]+([\w., \t]+))", re.M
)
_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.M)
_SCRIPT: Final = re.compile(r"""(?:\bfrom|\bimport|\brequire\s*\(|\bimport\s*\()\s*['"](\.[^'"\n]+)['"]""")
_JVM: Final = re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.]+)", re.M)
_RUST: Final = re.compile(r"^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?mod[ \t]+(\w+)[ \t]*;|\b(?:crate|super)::(\w+)", re.M)


def repositories_in(root: Path) -> list[Path]:
    """Return the repositories in a folder, which are its subfolders, sorted by name, without hidden folders."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def repository_files(root: Path) -> list[Path]:
    """Return the code of a repository, sorted by path, without hidden files and folders."""
    return shown_files((path for path in root.rglob("*") if path.suffix in SUFFIXES), root)


def joined_files(texts: Mapping[str, str]) -> str:
    """Return one text of all files of a repository in the order of their dependencies, each after a line with its path.

    ``texts``: text of each file by its path in the repository.
    """
    marks = {name: "#" if name.endswith(_PYTHON_FILES) else "//" for name in texts}
    return "\n".join(f"{marks[name]} {name}\n{texts[name].rstrip()}\n" for name in in_order(texts))


def in_order(texts: Mapping[str, str]) -> list[str]:
    """Return the paths of files, each after the files that it needs, as far as these do not need it.

    Independent files are in the order of their paths. Of a cycle the first file by path comes last.
    """
    known = _Names(texts)
    needs = {name: sorted(known.needs(name, text) - {name}) for name, text in texts.items()}
    ordered: dict[str, None] = {}
    begun: set[str] = set()
    for first in sorted(texts):
        stack = [] if first in begun else [(first, iter(needs[first]))]
        begun.add(first)
        while stack:
            name, waiting = stack[-1]
            following = next((other for other in waiting if other not in begun), None)
            if following is None:
                ordered[name] = None
                stack.pop()
            else:
                begun.add(following)
                stack.append((following, iter(needs[following])))
    return list(ordered)


class _Names:
    """Files of a repository by the ends of their paths, as imports name them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._ends: dict[str, list[str]] = {}
        for name in self._names:
            parts = name.split("/")
            for place in range(len(parts)):
                self._ends.setdefault("/".join(parts[place:]), []).append(name)

    def needs(self, name: str, text: str) -> set[str]:
        """Return the files that a file imports or includes."""
        suffix, folder = PurePosixPath(name).suffix, PurePosixPath(name).parent
        if suffix in _PYTHON_FILES:
            paths = [path for module in _modules(text) for path in _python_paths(module, folder)]
        elif suffix in _C_FILES:
            paths = _INCLUDE.findall(text)
        elif suffix in _SCRIPTS:
            paths = [path for stem in _SCRIPT.findall(text) for path in _script_paths(_below(folder, stem))]
        elif suffix in _JVM_FILES:
            paths = [module.replace(".", "/") + suffix for module in _JVM.findall(text)]
        elif suffix == ".rs":
            stems = {first or second for first, second in _RUST.findall(text)}
            paths = [path for stem in sorted(stems) for path in (f"{stem}.rs", f"{stem}/mod.rs")]
        else:
            paths = []
        return {found for path in paths for found in [self._nearest(path, folder)] if found is not None}

    def _nearest(self, path: str, folder: PurePosixPath) -> str | None:
        """Return the file that a path names: in the same folder, or whose path ends so and shares the most folders."""
        beside = _below(folder, path)
        if beside in self._ends and beside in self._ends[beside]:
            return beside
        candidates = self._ends.get(path.lstrip("./"), [])
        return max(candidates, key=lambda name: _shared(name, str(folder)), default=None)


def _modules(text: str) -> Iterator[str]:
    """Yield the modules that a Python file imports, and the names that may be modules."""
    for origin, names, modules in _PYTHON.findall(text):
        if origin:
            yield origin
        listed = (name.split() for name in (names if origin else modules).strip("() \t").split(","))
        for name in (words[0] for words in listed if words):
            yield f"{origin}{'' if not origin or origin.endswith('.') else '.'}{name}"


def _python_paths(module: str, folder: PurePosixPath) -> list[str]:
    dots = len(module) - len(module.lstrip("."))
    stem = module[dots:].replace(".", "/")
    if dots:
        parents = [folder, *folder.parents]
        base = parents[dots - 1].as_posix() if dots <= len(parents) else ""
        stem = "/".join(part for part in (base if base != "." else "", stem) if part)
    return [f"{stem}.py", f"{stem}/__init__.py"] if stem else []


def _script_paths(stem: str) -> list[str]:
    return [stem, *(stem + ending for ending in _SCRIPTS), *(f"{stem}/index{ending}" for ending in _SCRIPTS)]


def _below(folder: PurePosixPath, path: str) -> str:
    """Return a path relative to a folder, without . and .. parts."""
    parts: list[str] = []
    for part in [*folder.parts, *path.split("/")]:
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return "/".join(parts)


def _shared(name: str, folder: str) -> int:
    """Return the number of leading folders that two paths share."""
    pairs = zip(name.split("/"), folder.split("/"), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(name.count("/"), folder.count("/") + 1))
