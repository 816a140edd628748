"""Rules for the source tree: functions, names, docstrings, locations of tests, numbers of flags and patches.

test_imports.py checks the directions of imports; exceptions.py lists the exceptions from both.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

from megatron.bytescale.arguments.parse import add_arguments
from tests.exceptions import FOREIGN_SIGNATURES, MAY_USE_ANY, TESTED_ELSEWHERE
from tests.tree import (
    FILES,
    PACKAGES,
    PYTHON,
    ROOT,
    SOURCE,
    TESTS,
    for_each,
    functions_of,
    imported_modules,
    imports_of,
    is_under,
    module_of,
    nodes_of,
    parameters_of,
    patch_rows,
    text_of,
    tree_of,
)

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_FLAGS = 75  # our own flags
MAX_ANY = 350  # in the packages, because arguments and objects of Megatron have no types
MAX_PATCHES = 12  # rows that replace a function on any machine
MAX_ROWS = 30  # including rows for CPUs, functions that slices run copies of, and 11 specialized classes
SETS_ATTRIBUTES = {
    "megatron/bytescale/registry.py",
    "megatron/bytescale/cpu.py",
    "megatron/bytescale/core/models/gpt/gpt_layer_specs.py",  # on a separate layer spec
    "scripts/bench/cluster/virtual/rank.py",  # other plans, in a bench
    "scripts/bench/cluster/virtual/record.py",  # records calls, in a bench
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Folders of the source, and folders of the tests that mirror them.
MIRRORS = {"bytescale_ext": "tests", "megatron/bytescale": "tests/bytescale", "scripts/bench": "tests/bench"}
NO_MIRROR = (
    "tests.e2e",
    "tests.cluster",
    "tests.faults",
    "tests.doubles",
    "tests.ghost",
    "tests.hostile",
    "tests.scripts",
    "tests.reference",
    "tests.survey",
)  # whole trainings, faults, ghost GPUs, launchers
ARRAY_TYPE = r"ndarray|NDArray|Tensor"
SHAPE = re.compile(r"\[[^\]]+\]|\b(shapes?|scalars?|one-dimensional)\b", re.IGNORECASE)


def mirrored(name: str) -> str | None:
    """Return the folder of the tests of a source file, or None if no folder mirrors it."""
    roots = [root for root in MIRRORS if name.startswith(root + "/")]
    return str(Path(MIRRORS[roots[0]], Path(name).parent.relative_to(roots[0]))) if roots else None


MIRRORED = {"tests", "tests/bench", *map(mirrored, SOURCE)}


def is_overload(node: ast.FunctionDef) -> bool:
    """Return whether a function only adds a signature to the function below it, which has the docstring."""
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


@cache
def array_functions(name: str) -> list[tuple[str, str]]:
    """Return (name, docstring) of each public function and method that takes or returns an array."""
    tree = tree_of(name)
    aliases = [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and not node.targets[0].id.isupper()  # a constant
        and re.search(ARRAY_TYPE, ast.unparse(node.value))
    ]
    imported = [module.rpartition(".")[2] for module in imports_of(name)]
    aliases += [one for one in imported if one in ("Ints", "Floats", "Bools")]
    array = re.compile(rf"\b({'|'.join([ARRAY_TYPE, *aliases])})\b")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    found = []
    for owner in (tree, *classes):
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_overload(node):
                annotations = [one.annotation for one in parameters_of(node)] + [node.returns]
                if any(array.search(ast.unparse(one)) for one in annotations if one is not None):
                    found.append((node.name, ast.get_docstring(node) or ""))
    return found


def count_any(name: str) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes_of(name))


def test_there_is_something_to_check() -> None:
    assert "pretrain_gpt_hdp.py" in SOURCE
    assert len(PACKAGES) > 40
    assert sum(len(array_functions(name)) for name in SOURCE) > 50
    assert mirrored("megatron/bytescale/cli/plan.py") == "tests/bytescale/cli"


@for_each(PYTHON)
def test_functions_are_short(name: str) -> None:
    for node in functions_of(name):
        lines = (node.end_lineno or 0) - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"


@for_each(SOURCE)
def test_parameters_are_few(name: str) -> None:
    for node in functions_of(name):
        if (name, node.name) not in FOREIGN_SIGNATURES:
            count = len(parameters_of(node))
            assert count <= MAX_PARAMETERS, f"{node.name}: {count} parameters; make a value of some of them"


def test_foreign_signatures_are_long() -> None:
    for (name, function), why in FOREIGN_SIGNATURES.items():
        counts = [len(parameters_of(node)) for node in functions_of(name) if node.name == function]
        assert max(counts, default=0) > MAX_PARAMETERS, f"{name}: {function} needs no exception"
        assert why


@for_each(SOURCE)
def test_array_functions_name_their_shapes(name: str) -> None:
    without = [function for function, docstring in array_functions(name) if not SHAPE.search(docstring)]
    assert not without, "the docstring says no shape, such as [n]"


@cache
def in_folder(folder: str) -> tuple[str, ...]:
    return tuple(test for test in TESTS if test.rpartition("/")[0] == folder)


@for_each([name for name in PACKAGES if name.startswith("bytescale_ext/")])
def test_a_test_of_the_mirrored_folder_imports_each_module(name: str) -> None:
    """Modules of megatron/ may be tested only by whole trainings."""
    folder = mirrored(name)
    if folder is None or name in TESTED_ELSEWHERE or Path(name).name == "__init__.py":
        return
    beside = in_folder(folder)
    by_name = f"{folder}/test_{Path(name).stem}.py" in beside
    module = module_of(name)
    assert by_name or any(is_under(one, module) for test in beside for one in imports_of(test))


@for_each(TESTS)
def test_tests_lie_where_the_source_does(name: str) -> None:
    folder = str(Path(name).parent)
    assert folder in MIRRORED or is_under(folder.replace("/", "."), *NO_MIRROR)


def test_exceptions_are_needed() -> None:
    assert TESTED_ELSEWHERE.keys() <= set(PACKAGES)


def test_types_are_known() -> None:
    assert {name for name in PACKAGES if name.startswith("bytescale_ext/") and count_any(name)} == set(MAY_USE_ANY)
    assert sum(count_any(name) for name in PACKAGES) <= MAX_ANY


@for_each(PYTHON)
def test_no_bare_except(name: str) -> None:
    for node in nodes_of(name):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"line {node.lineno}"


@for_each(sorted(set(SOURCE) - SETS_ATTRIBUTES))
def test_only_the_registry_replaces_parts_of_megatron(name: str) -> None:
    assert "ignore[method-assign]" not in text_of(name), "mypy says that a method is replaced"
    foreign = {module.split(".")[-1] for module in imports_of(name) if is_under(module, "megatron")}
    for node in nodes_of(name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "setattr", f"line {node.lineno}"
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            owner = target.value if isinstance(target, ast.Attribute) else None
            assert not (isinstance(owner, ast.Name) and owner.id in foreign), f"line {node.lineno}"


@for_each(SOURCE)
def test_public_names_have_docstrings(name: str) -> None:
    tree = tree_of(name)
    if not tree.body:
        return  # an empty __init__.py
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@for_each(FILES)
def test_names_of_files(name: str) -> None:
    stem = Path(name).stem
    assert stem not in ("utils", "util", "helper", "helpers", "manager", "common", "misc"), name
    assert not re.search(r"_v\d+$|manager|helper", stem), name


@for_each(FILES)
def test_no_paths_of_a_machine(name: str) -> None:
    try:
        text = text_of(name)
    except UnicodeDecodeError:
        return  # a picture
    found = re.search(r"(?<![\w.$}~-])/(?:home|root|work|Users)/\w+", text)
    assert found is None, found


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert not (ROOT / "tests" / "megatron").exists()
    assert {path.name for path in (ROOT / "megatron").iterdir() if path.is_dir()} <= {"bytescale", "__pycache__"}


def test_flags_are_few() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    assert 60 < sum(len(action.option_strings) for action in parser._actions) <= MAX_FLAGS


def test_patches_are_few() -> None:
    rows = patch_rows()
    assert len(rows) <= MAX_ROWS
    assert 1 <= sum("wrap" in row and row["features"] != "(CPU,)" for row in rows) <= MAX_PATCHES


# Functions and modules that run code of a file, or shells, by full name. A module covers what is in it. Aliases are
# resolved, so `from pickle import load as read` is pickle.load too.
RUNS_CODE = {
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "pickle.load", "pickle.loads",
    "pickle.Unpickler", "_pickle", "dill", "cloudpickle", "jsonpickle", "joblib", "marshal", "shelve",
    "pandas.read_pickle", "skops", "multiprocessing.connection.Client", "multiprocessing.connection.Listener",
    "multiprocessing.managers", "os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.execvpe", "os.execl",
    "os.execlp", "os.posix_spawn", "os.spawnv", "os.spawnl", "pty.spawn", "subprocess.getoutput",
    "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "runpy", "imp", "code", "codeop", "types.CodeType",
    "types.FunctionType", "importlib.import_module", "importlib.machinery", "importlib.util.spec_from_file_location",
    "importlib.util.module_from_spec", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "yaml.full_load", "yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "torch.jit.load",
    "torch.hub", "torch.package", "torch.export.load", "torch.ops.load_library", "torch.classes.load_library",
    "torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline", "ctypes", "fasttext", "onnx",
    "onnxruntime", "tensorflow", "keras", "numpy.lib.format.read_array", "numpy.ctypeslib", "jinja2.Template",
    "jinja2.Environment", "jinja2.sandbox", "site.addsitedir", "logging.config", "webbrowser",
}  # fmt: skip
BUILTINS = {name.removeprefix("builtins.") for name in RUNS_CODE if name.startswith("builtins.")}
REVIEWED = {
    "bytescale_ext/attention/kernels/flash_attn.py": {"importlib.import_module"},  # packages of our table of kernels
    "bytescale_ext/data/clean/classifiers.py": {  # packages of a table; types are checked
        "importlib.import_module", "skops", "fasttext", "onnxruntime",
    },
    "bytescale_ext/data/clean/own.py": {  # --trust-recipe
        "importlib.import_module", "importlib.util.spec_from_file_location", "importlib.util.module_from_spec",
    },
    "bytescale_ext/data/loading/plan_pipe.py": {"pickle.load", "pickle.loads"},  # the pipe of a process it started
    "bytescale_ext/data/loading/plan_worker.py": {"pickle.load"},  # the pipe of the process that started it
    "bytescale_ext/data/samples/template_limits.py": {"jinja2.Environment"},  # a type; the environment is a sandbox
    "bytescale_ext/parallel/flight.py": {"pickle.loads"},  # what torch records in this process
    "megatron/bytescale/arguments/values.py": {"importlib.import_module"},  # a constant
    "megatron/bytescale/checkpoints.py": {"pickle.loads"},  # after the scan for classes
    "megatron/bytescale/cli/shared/megatron_dynamic.py": {  # --megatron
        "importlib.util.spec_from_file_location", "importlib.util.module_from_spec",
    },
    "megatron/bytescale/convert/library.py": {"importlib.import_module"},  # constants
    "megatron/bytescale/registry.py": {"importlib.import_module", "types.FunctionType"},  # names of our table
    "scripts/bench/cluster/virtual/planned_once.py": {"pickle.load"},  # of another rank of the recording
}  # fmt: skip
IMPORTERS = {"importlib.import_module", "library", "_package"}
SAFE_ONLY = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
TRUST = {"trust_remote_code", "shell"}
TRUSTS_TOKENIZERS = {
    "megatron/bytescale/cli/generate/command.py",  # --trust-remote-code
    "megatron/bytescale/cli/generate/texts.py",  # replaces what the checkpoint says by the flag
    "megatron/bytescale/convert/folders.py",  # False
    "megatron/bytescale/convert/config_file.py",  # False
}


def dotted(node: ast.AST) -> str:
    """Return the name of a function in a call, such as "pickle.load"; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value) or '?'}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def bound_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Return the full name of each name that the nodes import, and of builtin functions that run code."""
    bound = {name: f"builtins.{name}" for name in BUILTINS}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            bound |= {
                alias.asname or first: alias.name if alias.asname else first
                for alias in node.names
                for first in [alias.name.partition(".")[0]]
            }
    return bound


def full_name(node: ast.AST, bound: dict[str, str]) -> str:
    """Return the name of a function with its module, if the nodes import it; empty for other names."""
    first, dot, rest = dotted(node).partition(".")
    return bound[first] + dot + rest if first in bound else ""


def dangerous(nodes: Sequence[ast.AST]) -> dict[str, int]:
    """Return the entries of ``RUNS_CODE`` that the nodes name, each with a line; also texts given to an importer."""
    bound = bound_names(nodes)
    named = [(node.lineno, full_name(node, bound)) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    named += [(node.lineno, name) for node in nodes for name in imported_modules([node])]
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in IMPORTERS and isinstance(node.args[0], ast.Constant):
            named.append((node.lineno, str(node.args[0].value)))
    prefixes = ((line, accumulate(name.split("."), "{}.{}".format)) for line, name in named)
    return {entry: line for line, names in prefixes for entry in names if entry in RUNS_CODE}


def unsafe(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield what is wrong with the calls of nodes: words that are not stated, or that trust a file."""
    bound = bound_names(nodes)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: word.value for word in node.keywords}
        stated = {word: value.value for word, value in given.items() if isinstance(value, ast.Constant)}
        if dotted(node.func).endswith(".from_pretrained") and "trust_remote_code" not in given and None not in given:
            yield f"line {node.lineno}: state trust_remote_code"
        yield from (f"line {node.lineno}: {word}" for word in TRUST & set(given) if stated.get(word) is not False)
        word, value = SAFE_ONLY.get(name := full_name(node.func, bound), ("", None))
        if word and stated.get(word) is not value:
            yield f"line {node.lineno}: {name} needs {word}={value}"


@for_each(PACKAGES)
def test_no_file_runs_code(name: str) -> None:
    """Of the modules that unpickle, evaluate or start shells, each was reviewed."""
    for node in nodes_of(name):
        if isinstance(node, ast.Constant | ast.Attribute) and "trust_remote_code" in (
            getattr(node, "value", ""), getattr(node, "attr", ""),
        ):  # fmt: skip
            assert name in TRUSTS_TOKENIZERS, f"line {node.lineno}"
    found = dangerous(nodes_of(name))
    assert set(found) <= REVIEWED.get(name, set()), found
    assert not list(unsafe(nodes_of(name)))


def test_reviewed_files_need_their_review() -> None:
    for name, functions in REVIEWED.items():
        assert functions <= set(dangerous(nodes_of(name))), name


RUNNING = """
eval(text) | exec(text) | __import__(name) | f = compile | import builtins as b; b.eval(x)
from pickle import load; load(f) | from pickle import loads as read; read(x) | import pickle as p; p.Unpickler(f)
import pickle; pickle.load(f) | import _pickle | import joblib
from joblib import load | import shelve; shelve.open(x) | import marshal
import dill
import torch; torch.jit.load(x) | from torch import jit; jit.load(x) | import torch.hub | from torch.hub import load
import yaml; yaml.load(f) | from yaml import load | import pandas as pd; pd.read_pickle(x) | import os; os.system(x)
from os import popen as p | import onnx | import fasttext | library("joblib") | _package("onnxruntime", path, "o")
import importlib as i; i.import_module("pickle") | import skops.io as sio | from ctypes import CDLL | import runpy
""".replace("\n", "|")
TRUSTING = """
import torch; torch.load(x) | import torch as t; t.load(x, weights_only=False) | from torch import load; load(x)
import numpy as np; np.load(x) | from numpy import load as read; read(x)
import numpy; numpy.load(x, allow_pickle=True)
run(x, shell=True) | run(x, shell=y) | A.from_pretrained(x) | A.from_pretrained(x, trust_remote_code=yes)
""".replace("\n", "|")
HARMLESS = """
import torch; torch.load(x, weights_only=True) | import numpy as np; np.load(x, allow_pickle=False) | re.compile(x)
run(x, shell=False) | json.load(f) | import pickle; pickle.dumps(x) | A.from_pretrained(x, trust_remote_code=False)
code = 5; code + 1 | yaml.safe_load(f) | from yaml import safe_load | library("safetensors") | model.eval()
""".replace("\n", "|")


def test_code_that_runs_is_recognized() -> None:
    for text, runs in ((RUNNING, True), (TRUSTING, True), (HARMLESS, False)):
        for line in filter(str.strip, text.split("|")):
            nodes = tuple(ast.walk(ast.parse(line.strip())))
            assert bool(dangerous(nodes) or list(unsafe(nodes))) == runs, line


WRITERS = {"bytescale_ext/new_file.py"}  # creates files exclusively
WRITING_CALLS = {
    "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "tofile", "savefig", "save_file", "save_model",
    "write_table", "to_parquet", "to_csv", "savetxt", "savez_compressed", "save_pretrained", "mkfifo",
    "FileHandler", "ParquetWriter", "SummaryWriter", "copy2", "copyfile", "copytree", "symlink", "open_memmap",
}  # fmt: skip
"""Last names of functions that write to a path."""
WRITING_FUNCTIONS = {"shutil.copy", "shutil.move", "os.link", "sqlite3.connect", "os.mknod"}
TAKES_STREAMS = {"np.save", "np.savez", "torch.save", "figure.savefig"}
MODE = re.compile("[rwxabtU+]{1,4}")


def writes_through_links(node: ast.Call) -> bool:
    """Return whether a call opens a file for writing, under a name at which somebody may have planted a link."""
    function = dotted(node.func)
    last = function.rpartition(".")[2]
    if function in TAKES_STREAMS:
        return not (isinstance(node.args[0], ast.Name) and node.args[0].id in ("stream", "file"))
    if (last in WRITING_CALLS and function != last) or function in WRITING_FUNCTIONS:
        return True
    if function == "os.open":
        flags = ast.unparse(node.args[1])
        return "O_TRUNC" in flags or ("O_CREAT" in flags and "O_EXCL" not in flags)
    if function == "open" and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, int):
        return False  # an open file
    if last not in {"open", "fdopen", "memmap", "ZipFile", "TarFile"} or function == "os.fdopen":
        return False
    given = [*node.args[:3], *(word.value for word in node.keywords if word.arg == "mode")]
    modes = [str(mode.value) for mode in given if isinstance(mode, ast.Constant)]
    return any(MODE.fullmatch(mode) and set(mode) & set("wax+") for mode in modes)


WRITES = """
open(path, "w"); open(path, mode="a"); open("w", "x"); io.open(path, "r+"); path.open("wb"); path.open(mode="w")
gzip.open(path, "wb"); lzma.open(path, mode="w"); tarfile.open(path, "w"); zipfile.ZipFile(path, "w")
path.write_text(text); path.write_bytes(data); path.touch(); path.symlink_to(other); values.tofile(path)
np.save(path, values); np.savez(folder / name, a=values); torch.save(state, path); np.savetxt(path, values)
np.memmap(path, float, "w+"); np.memmap(path, mode="r+"); np.lib.format.open_memmap(path, "w+")
plt.savefig(path); figure.savefig(path); safetensors.save_file(parts, path); pq.write_table(table, path)
table.to_parquet(path); model.save_pretrained(folder); shutil.copy(one, other); shutil.copyfile(one, other)
shutil.copytree(one, other); shutil.move(one, other); os.open(path, os.O_WRONLY | os.O_CREAT)
os.open(path, os.O_WRONLY | os.O_TRUNC); logging.FileHandler(path); sqlite3.connect(path)
"""
READS = """
open(path); open(path, "rb"); path.open(); path.open("rb"); gzip.open(path, "rb"); np.save(stream, values)
np.memmap(path, mode="r"); zipfile.ZipFile(path); os.open(path, os.O_RDONLY); open(3, "wb"); figure.savefig(file)
os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL); np.load(path); shutil.copyfileobj(one, other)
"""


def test_writers_are_recognized() -> None:
    for text, writes in ((WRITES, True), (READS, False)):
        calls = [node.value for node in ast.parse(text).body if isinstance(node, ast.Expr)]
        assert len(calls) > 10
        for call in calls:
            assert isinstance(call, ast.Call)
            assert writes_through_links(call) == writes, ast.unparse(call)


@for_each(SOURCE)
def test_files_are_created_by_one_module(name: str) -> None:
    for node in nodes_of(name):
        if isinstance(node, ast.Call) and writes_through_links(node):
            assert name in WRITERS or ast.unparse(node) in ALLOWED_WRITES.get(name, ()), (
                f"line {node.lineno}: use bytescale_ext/new_file.py: {ast.unparse(node)}"
            )


# Writes that were reviewed: they create no file in a folder of others.
ALLOWED_WRITES = {
    "megatron/bytescale/cli/__init__.py": ["open(os.devnull, 'w')"],
    "bytescale_ext/data/samples/template_limits.py": ["open(os.devnull, 'w')"],
    "bytescale_ext/data/clean/near.py": ["np.memmap(path, bool, 'r+')"],  # the file was made two lines above
    "megatron/bytescale/training/logprobs.py": [  # opened without following a link
        "np.memmap(file, dtype=np.float32, mode='r+')",
    ],
    # Folders that new_folder() has made, which get their names when they are complete.
    "megatron/bytescale/convert/config_file.py": ["made.save_pretrained(folder)"],
    "megatron/bytescale/convert/folders.py": [
        "library('safetensors.torch').save_file(parts, folder / name, metadata={'format': 'pt'})",
        "library('transformers').AutoTokenizer.from_pretrained(model, **ONLY_THIS_FOLDER).save_pretrained(output)",
    ],
    "megatron/bytescale/convert/source.py": ["shutil.copyfile(path, copy)"],
    "megatron/bytescale/inference/heads_folder.py": [
        "library.save_file(plain, part / TENSORS, metadata={'format': 'pt'})",
    ],
    "scripts/cluster/ranks.py": ["(groups.folders[rank] / 'cgroup.procs').write_text('0')"],
    "scripts/cluster/quotas.py": [  # files of the kernel
        "(self.base / 'cgroup.subtree_control').write_text('+cpu')",
        "(self.top / 'cgroup.subtree_control').write_text('+cpu')",
        "(self.helpers / name).write_text(str(least))",
        "(folder / 'cpu.cfs_period_us').write_text(str(PERIOD_US))",
        "(folder / 'cpu.cfs_quota_us').write_text(str(quota))",
        "(folder / 'cpu.max').write_text(f'{quota} {PERIOD_US}')",
        "(self.helpers / 'cgroup.procs').write_text(str(helper))",
    ],
    "scripts/bench/data/startup.py": [  # two handles fill one file, in a folder of the benchmark
        "prefix.with_suffix('.idx').open('wb')",
        "prefix.with_suffix('.idx').open('r+b')",
        "prefix.with_suffix('.bin').open('wb')",
        "lengths.tofile(lengths_file)",
        "((ends - lengths) * 2).tofile(pointers_file)",
        "np.arange(begin, min(begin + _PART, num_documents + 1), dtype=np.int64).tofile(pointers_file)",
    ],
}


def test_allowed_writes_are_needed() -> None:
    for name, allowed in ALLOWED_WRITES.items():
        calls = [node for node in nodes_of(name) if isinstance(node, ast.Call)]
        assert set(allowed) <= {ast.unparse(call) for call in calls if writes_through_links(call)}, name
