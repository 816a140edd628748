"""Checks, replaces and restores functions of Megatron, for all features.

A ``Patch`` row names one function, gives the reason why no hook of Megatron suffices, and contains the hash of the
source that it was written for. ``Installation`` checks all rows against the installed Megatron before it applies the
first row. No other code sets an attribute of a Megatron object (tests/test_layout.py, tests/bytescale/test_patches.py).
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
Holder = types.ModuleType | type  # owner of a function


@dataclass(frozen=True)
class Patch:
    """One Megatron function that is replaced or copied.

    Attributes:
        target: definition of the function, "module:function" or "module:Class.method".
        features: names of the features that need the row.
        why: reason why no argument, callable, spec or call site suffices.
        source_hash: first 12 hex digits of the sha256 of ``inspect.getsource(original)``.
        wrap: (original, runtime) -> replacement. None: the function stays, and ``copy_with_names`` runs a copy of it,
            or replaces its name in such a copy.
        aliases: other modules that import the same function by ``from ... import``.
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
    """Return (module or class, attribute, function) of a row's target. Raises ValueError if it does not exist."""
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
    """Raise ValueError if a row's function has other source code, is already wrapped, or differs from an alias."""
    _, attribute, function = resolve(patch.target)
    if inspect.unwrap(function) is not function:  # the wrapper would hide another source
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
    """The currently replaced functions, as (module or class, attribute, original)."""

    originals: list[tuple[Holder, str, Function]] = field(default_factory=list)

    def install(self, patches: Sequence[Patch], runtime: object) -> None:
        """Check every row, then apply every row. Raises ValueError before any function is replaced."""
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
        """Restore every original, in reverse order."""
        while self.originals:
            setattr(*self.originals.pop())

    def names(self) -> list[str]:
        """Return "module.function" or "module.Class.method" of every replaced function."""
        return [f"{_full_name(holder)}.{attribute}" for holder, attribute, _ in self.originals]


def _full_name(holder: Holder) -> str:
    return f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder.__name__


def copy_with_names(function: Function, **names: object) -> Function:
    """Return a copy of a function with some of its global names bound to other objects. Its module stays unchanged."""
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
    """Return a printed row of the table: function, state, hash, features, reason, owners."""
    _, _, function = resolve(patch.target)
    original = getattr(function, "__wrapped__", function)
    state = "replaced" if original is not function else "copied" if patch.wrap is None else "untouched"
    if source_hash(original) != patch.source_hash:
        state = f"unknown source {source_hash(original)}"
    name, features = patch.target.partition(":")[2], ", ".join(patch.features)
    holders = ", ".join((patch.target.replace(":", "."), *patch.aliases))
    return f"{name:45} {state:10} {patch.source_hash}  {features}: {patch.why} [{holders}]"
