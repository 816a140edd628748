"""Source tree for the tests of its layout. ``python -m tests.tree`` draws plan/ on the architecture page."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAN = "bytescale_ext.plan"
PAGE = ROOT / "docs" / "architecture.md"


def repository_files() -> list[str]:
    """Return the paths of all files that git does not ignore; without git, of the Python files."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode == 0:
        return sorted(name for name in set(listing.stdout.splitlines()) if (ROOT / name).is_file())
    folders = ("megatron", "bytescale_ext", "scripts", "tests")
    nested = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.py"), *nested])


FILES = repository_files()
PYTHON = [name for name in FILES if name.endswith(".py")]
SOURCE = [name for name in PYTHON if not name.startswith("tests/")]
TESTS = [name for name in PYTHON if name.startswith("tests/")]
PACKAGES = [name for name in SOURCE if name.startswith(("megatron/", "bytescale_ext/"))]


def for_each(names: Sequence[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Turn a rule for one name into a single test of all names.

    Thousands of tests would take longer than their checks.
    """

    def test_of_all(rule: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for name in names:
                try:
                    rule(name)
                except AssertionError as error:
                    broken.append(f"{name}: {error}")
            assert not broken, "\n".join(broken)

        return test

    return test_of_all


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def tree_of(name: str) -> ast.Module:
    gc.disable()  # it would look through all trees again and again, which takes half of the time
    try:
        return ast.parse(text_of(name))
    finally:
        gc.enable()


@cache
def nodes_of(name: str) -> tuple[ast.AST, ...]:
    """Return every node of a file. Cached, because the rules of the layout read the same trees many times."""
    return tuple(ast.walk(tree_of(name)))


@cache
def functions_of(name: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """Return every function of a file, including methods and nested functions."""
    return tuple(node for node in nodes_of(name) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Return the parameters of a function without self, cls, *args and **kwargs."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one for one in given if one.arg not in ("self", "cls")]


def module_of(name: str) -> str:
    """Return the dotted name of a file."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports_of(name: str) -> tuple[str, ...]:
    """Return every module that a file imports, at any depth. ``from a import b`` also counts as a.b."""
    return tuple(imported_modules(nodes_of(name)))


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield every module that these nodes import."""
    for one in nodes:
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            assert one.level == 0, f"line {one.lineno}: import with the full name"
            yield from (f"{one.module}.{alias.name}" for alias in one.names)


def patch_rows() -> list[dict[str | None, str]]:
    """Return the rows of the table of patches from the source, without importing Megatron."""
    return [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for node in ast.walk(tree_of("megatron/bytescale/patches.py"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Patch"
    ]


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


MODULES = {module_of(name): name for name in PYTHON}


def known_module(imported: str) -> str | None:
    """Return the module of this repository that an import names, or the module that contains the imported name."""
    return next((module for module in (imported, imported.rpartition(".")[0]) if module in MODULES), None)


def runtime_imports(name: str, in_functions: bool) -> set[str]:
    """Return the modules of this repository that a file imports at run time, without imports for types.

    Imports inside functions count only with `in_functions`.
    """
    waiting: list[ast.AST] = list(tree_of(name).body)
    found: set[str | None] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {known_module(module) for module in imported_modules([node])}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)
            ]
    return {module for module in found if module is not None} - {module_of(name)}


def nodes_in_cycles(arrows: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the nodes of a graph that are on a cycle."""

    def reached_from(start: str) -> set[str]:
        reached: set[str] = set()
        waiting = [start]
        while waiting:
            new = set(arrows[waiting.pop()]) - reached
            reached |= new
            waiting += new
        return reached

    return {node for node in arrows if node in reached_from(node)}


def room_arrows() -> dict[str, Counter[str]]:
    """Return the number of imports of each room of plan/ from each other room, at any depth."""
    rooms: dict[str, Counter[str]] = {}
    for module, name in MODULES.items():
        if not is_under(module, PLAN) or name.endswith("__init__.py"):
            continue
        room = module.split(".")[2]
        used = {known_module(one) for one in imports_of(name)}
        targets = [one.split(".")[2] for one in used if one and is_under(one, PLAN) and one != PLAN]
        rooms.setdefault(room, Counter()).update(one for one in targets if one != room)
    return rooms


def floors(arrows: dict[str, Counter[str]]) -> dict[str, int]:
    """Return the floor of each room: one above the highest room that it imports from. The lowest floor is 1."""
    assert not nodes_in_cycles(arrows)
    found: dict[str, int] = {}
    while len(found) < len(arrows):
        for room, targets in arrows.items():
            if targets.keys() <= found.keys():
                found[room] = 1 + max((found[target] for target in targets), default=0)
    return found


def drawing() -> str:
    """Return the rooms of plan/ as text: floor, room, and the rooms that it imports from."""
    arrows = room_arrows()
    level = floors(arrows)
    lines = []
    for room in sorted(arrows, key=lambda room: (-level[room], room)):
        below = sorted(arrows[room], key=lambda target: (-level[target], target))
        lines.append(f"{level[room]}  {room:<11}-> {', '.join(below)}")
    return "\n".join(line.removesuffix("-> ").rstrip() for line in lines)


def with_rooms(text: str) -> str:
    """Return the architecture page with a new drawing of the rooms between its two marks."""
    begin, end = "<!-- rooms: begin -->\n", "<!-- rooms: end -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}```\n{drawing()}\n```\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_rooms(PAGE.read_text()))
