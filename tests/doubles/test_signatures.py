"""Doubles of packages that need a GPU have the recorded public signatures, and Megatron's calls fit all of them."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.moe import fused_a2a

RECORDED = tomllib.loads((Path(__file__).parent / "signatures.toml").read_text(encoding="utf-8"))["function"]
NAMES = sorted({(row["package"], row["name"]) for row in RECORDED})
VARIABLES = {"_hybrid_ep_buffer": "HybridEPBuffer", "buffer": "Buffer"}
"""Variables of Megatron's module and the classes of their values."""


def written(function: Any) -> list[str]:
    """Return the parameters of a method as in the file, without ``self``."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    words: list[str] = []
    for one in parameters:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(one.name if one.default is inspect.Parameter.empty else f"{one.name}={one.default!r}")
    return words


def recorded(row: dict[str, Any]) -> list[str]:
    return [word.strip() for word in row["parameters"].split(",")]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_double_has_a_recorded_signature(package: str, name: str) -> None:
    kind, method = name.split(".")
    double = importlib.import_module(f"tests.doubles.{package}")
    rows = [row for row in RECORDED if (row["package"], row["name"]) == (package, name)]
    assert written(getattr(getattr(double, kind), method)) in [recorded(row) for row in rows]


def calls_of_megatron() -> list[tuple[str, int, set[str]]]:
    """Return (method, number of positional arguments, named arguments) of the calls in Megatron's flex dispatcher."""
    tree = ast.parse(inspect.getsource(fused_a2a))
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = ""
        if isinstance(call.func, ast.Name) and call.func.id in VARIABLES.values():
            name = f"{call.func.id}.__init__"
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            name = f"{VARIABLES.get(call.func.value.id)}.{call.func.attr}"
        if any(row["name"] == name for row in RECORDED):
            found.append((name, len(call.args), {word.arg for word in call.keywords if word.arg is not None}))
    return found


def test_megatrons_calls_fit_every_recorded_version() -> None:
    calls = calls_of_megatron()
    assert {name for name, *_ in calls} == {row["name"] for row in RECORDED if row["package"] == "deep_ep"}
    for name, positional, named in calls:
        for row in RECORDED:
            if row["name"] != name:
                continue
            words = recorded(row)
            assert "*" not in words[:positional]
            names = [word.split("=")[0] for word in words if word != "*"]
            assert named <= set(names[positional:]), (name, row["version"])
            needed = {word for word in words if "=" not in word and word != "*"}
            assert needed <= {*names[:positional], *named}, (name, row["version"])
