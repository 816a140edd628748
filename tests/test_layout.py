"""The rules of the source tree: sizes, directions of imports, names, the frozen list of flags."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.bytescale.training.arguments import add_arguments

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_PATCHES = 8
TEST_LINES_PER_SOURCE_LINE = 0.8
FLAGS = [
    "--cpu",
    "--hybrid-data-parallel",
    "--hdp-tokens-per-rank",
    "--hdp-balance",
    "--hdp-cost",
    "--hdp-ranks-per-node",
    "--hdp-kept-keys",
    "--hdp-plan-ahead",
    "--hdp-plan-seconds",
    "--hdp-check-plans-every",
    "--hdp-attention-kernel",
    "--hdp-static-width",
    "--hdp-log-dir",
    "--hdp-timeline-step",
    "--hdp-loader",
    "--hdp-ray-address",
    "--hdp-ray-servers",
    "--hdp-ray-server-tokens",
    "--hdp-json-key",
    "--seq1f1b-splits",
    "--seq1f1b-partition",
    "--seq1f1b-cost",
    "--seq1f1b-eager",
    "--activation-policy",
    "--swap-fraction",
    "--recompute-fraction",
    "--host-memory-gb",
    "--device-memory-gb",
    "--host-link-gb-per-second",
    "--activation-cost",
    "--memory-plan",
    "--chunked-cross-entropy",
]
SETS_ATTRIBUTES = {
    "megatron/bytescale/registry.py",
    "megatron/bytescale/cpu.py",
    "megatron/bytescale/core/models/gpt/gpt_layer_specs.py",  # on a deep copy of a layer spec
}
DECISIONS = (ast.If, ast.For, ast.While, ast.Match)  # with and try decide nothing
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def repository_files() -> list[str]:
    """Paths of the files that git tracks or would; without git, of the Python files."""
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
PACKAGES = [name for name in SOURCE if name.startswith(("megatron/", "bytescale_ext/"))]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, at any depth; ``from a import b`` counts as a.b too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import with the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How deep decisions lie in one another; an ``elif`` is on the level of its ``if``."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            continue  # counted by itself
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (isinstance(child, DECISIONS) and not is_elif)))
    return deepest


def test_there_is_something_to_check() -> None:
    assert "pretrain_gpt_hdp.py" in SOURCE
    assert len(PACKAGES) > 40
    assert nesting(ast.parse("def f():\n if a:\n  for b in c:\n   pass\n elif d:\n  pass").body[0]) == 2


@pytest.mark.parametrize("name", SOURCE)
def test_files_and_functions_are_small(name: str) -> None:
    assert len(text_of(name).splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"
            assert nesting(node) <= MAX_NESTING, f"{node.name}: {nesting(node)} decisions in one another"


@pytest.mark.parametrize("name", SOURCE)
def test_imports_go_one_way(name: str) -> None:
    for module in imported_modules(tree_of(name)):
        assert not is_under(module, "tests"), module
        assert not is_under(module, "pretrain_gpt_hdp"), module
        if is_under(module, "megatron") and not is_under(module, "megatron.bytescale"):
            assert name == "pretrain_gpt_hdp.py" or name.startswith("megatron/bytescale/"), module
        if name.startswith("bytescale_ext/"):
            assert not is_under(module, "megatron"), module
        if name.startswith("bytescale_ext/plan/"):
            solver = ("ortools",) if name.endswith(("exact.py", "limit.py")) else ()  # inside one function, to certify
            allowed = is_under(module, "numpy", "bytescale_ext.plan", "bytescale_ext.errors", *solver)
            assert allowed or module.split(".")[0] in sys.stdlib_module_names, module


@pytest.mark.parametrize("name", SOURCE)
def test_megatrons_arguments_are_read_at_its_border_only(name: str) -> None:
    calls = re.findall(r"\bget_args\(", text_of(name))
    assert not calls or name.startswith("megatron/bytescale/")


@pytest.mark.parametrize("name", [*SOURCE, *(name for name in PYTHON if name.startswith("tests/"))])
def test_no_bare_except(name: str) -> None:
    for node in ast.walk(tree_of(name)):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"line {node.lineno}"


@pytest.mark.parametrize("name", [name for name in SOURCE if name not in SETS_ATTRIBUTES])
def test_only_the_registry_replaces_parts_of_megatron(name: str) -> None:
    tree = tree_of(name)
    foreign = {module.split(".")[-1] for module in imported_modules(tree) if is_under(module, "megatron")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "setattr", f"line {node.lineno}"
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            owner = target.value if isinstance(target, ast.Attribute) else None
            assert not (isinstance(owner, ast.Name) and owner.id in foreign), f"line {node.lineno}"


@pytest.mark.parametrize("name", SOURCE)
def test_public_names_have_docstrings(name: str) -> None:
    tree = tree_of(name)
    if not tree.body:
        return  # an empty __init__.py
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("name", FILES)
def test_names_of_files(name: str) -> None:
    stem = Path(name).stem
    assert stem not in ("utils", "util", "helper", "helpers", "manager", "common", "misc"), name
    assert not re.search(r"_v\d+$|manager|helper", stem), name


@pytest.mark.parametrize("name", FILES)
def test_no_paths_of_a_machine(name: str) -> None:
    try:
        text = text_of(name)
    except UnicodeDecodeError:
        pytest.skip("not text")
    found = re.search(r"(?<![\w.$}~-])/(?:home|root|work|Users)/\w+", text)
    assert found is None, found


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert not (ROOT / "tests" / "megatron").exists()
    assert {path.name for path in (ROOT / "megatron").iterdir() if path.is_dir()} <= {"bytescale", "__pycache__"}


def test_tests_are_no_smaller_than_the_source() -> None:
    def lines(names: list[str]) -> int:
        return sum(len(text_of(name).splitlines()) for name in names)

    assert lines([name for name in PYTHON if name.startswith("tests/")]) >= TEST_LINES_PER_SOURCE_LINE * lines(SOURCE)


def test_flags_are_frozen() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    assert [option for action in parser._actions for option in action.option_strings] == FLAGS


def test_patches_are_few() -> None:
    rows = [
        node
        for node in ast.walk(tree_of("megatron/bytescale/patches.py"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Patch"
    ]
    assert 1 <= len(rows) <= MAX_PATCHES
