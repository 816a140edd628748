"""Check, replace and restore functions of Megatron, for any feature.

A ``Patch`` row names one function, says why no hook of Megatron suffices, and holds the hash of the source that it was
written for. ``Installation`` checks all rows against the installed Megatron before it applies the first one. Nothing
else sets an attribute of a Megatron object (tests/test_layout.py, tests/bytescale/test_patches.py).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Function = Callable[..., Any]
Holder = types.ModuleType | type  # what a function of Megatron is an attribute of


@dataclass(frozen=True)
class Patch:
    """One Megatron function that is replaced or copied.

    Attributes:
        target: where the function is defined, "module:function" or "module:Class.method".
        features: names of the features that need the row.
        why: why no argument, callable, spec or call site suffices.
        source_hash: first 12 hex digits of sha256 of ``inspect.getsource(original)``.
        wrap: (original, runtime) -> replacement. None: Megatron keeps the function, and ``copy_with_names`` runs a copy
            of it, or names another function in such a copy.
        aliases: other modules that hold the same function by ``from ... import``.
    """

    target: str
    features: tuple[str, ...]
    why: str
    source_hash: str
    wrap: Callable[[Function, Any], Function] | None = None
    aliases: tuple[str, ...] = ()


def source_hash(function: Function) -> str:
    """Return the first 12 hex digits of the sha256 of a function's source text; "none" without source."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "none"


def resolve(target: str) -> tuple[Holder, str, Function]:
    """Return (module or class, attribute, function) of a row's target. Raises ValueError when it does not exist."""
    module_name, _, path = target.partition(":")
    *classes, attribute = path.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(module_name))
        return owner, attribute, vars(owner)[attribute]
    except (ImportError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{target} is not in the installed Megatron ({error}); install megatron-core==0.19.2"
        ) from error


def check(patch: Patch) -> None:
    """Raise ValueError if a row's function has another source, is wrapped already, or differs from an alias."""
    _, attribute, function = resolve(patch.target)
    if inspect.unwrap(function) is not function:  # its source would be read through the wrapper
        raise ValueError(f"{patch.target} is wrapped already: install once, and leave out libraries that replace it")
    actual = source_hash(function)
    if actual != patch.source_hash:
        raise ValueError(
            f"{patch.target} has source hash {actual}, the patch was written for {patch.source_hash}; "
            "install megatron-core==0.19.2, or review the row in megatron/bytescale/patches.py"
        )
    for alias in patch.aliases:
        if getattr(importlib.import_module(alias), attribute, None) is not function:
            raise ValueError(f"{alias}.{attribute} is not {patch.target}; another library has replaced it")


@dataclass
class Installation:
    """The functions replaced right now, as (module or class, attribute, original)."""

    originals: list[tuple[Holder, str, Function]] = field(default_factory=list)

    def install(self, patches: Sequence[Patch], runtime: object) -> None:
        """Check every row, then apply every row. Raises ValueError before anything is replaced."""
        for patch in patches:
            check(patch)
        for patch in patches:
            if patch.wrap is None:
                continue
            owner, attribute, original = resolve(patch.target)
            replacement = functools.wraps(original)(patch.wrap(original, runtime))
            for holder in (owner, *map(importlib.import_module, patch.aliases)):
                self.originals.append((holder, attribute, original))
                setattr(holder, attribute, replacement)

    def uninstall(self) -> None:
        """Put every original back, last replaced first."""
        while self.originals:
            setattr(*self.originals.pop())

    def names(self) -> list[str]:
        """Return "module.function" or "module.Class.method" of everything replaced."""
        return [f"{_full_name(holder)}.{attribute}" for holder, attribute, _ in self.originals]


def _full_name(holder: Holder) -> str:
    return f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder.__name__


def copy_with_names(function: Function, **names: object) -> Function:
    """Return a copy of a function in which these global names mean something else. Its module stays as it is."""
    assert isinstance(function, types.FunctionType) and names.keys() <= function.__globals__.keys(), f"{function=}"
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def describe(patch: Patch) -> str:
    """Return one printed row of the table: the function, its state, its hash, the features, the reason, the holders."""
    _, _, function = resolve(patch.target)
    original = getattr(function, "__wrapped__", function)
    state = "replaced" if original is not function else "copied" if patch.wrap is None else "untouched"
    if source_hash(original) != patch.source_hash:
        state = f"unknown source {source_hash(original)}"
    name, features = patch.target.partition(":")[2], ", ".join(patch.features)
    holders = ", ".join((patch.target.replace(":", "."), *patch.aliases))
    return f"{name:45} {state:10} {patch.source_hash}  {features}: {patch.why} [{holders}]"
