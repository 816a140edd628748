"""Checks, replaces and restores functions of Megatron, for all features.

A ``Patch`` row names one function, gives the reason why no hook of Megatron suffices, and lists the sources that the
row was read against: the hash of each, and the versions of Megatron that have it. A row can also name a class: objects
of a run then become objects of our subclass (``specialize``), and the hash covers the methods that the subclass
overrides. ``Installation`` checks all rows against the installed Megatron before it applies the first row. No other
code sets an attribute of Megatron's functions and classes, or the class of an object (tests/test_layout.py,
tests/bytescale/test_patches.py).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.bytescale.versions import REMEDY, installed_megatron

Function = Callable[..., Any]
Holder = types.ModuleType | type  # owner of a function
Subclass = type | Callable[[type], type]  # a subclass, or a function that makes one from a Megatron class


@dataclass(frozen=True)
class Source:
    """One source text of a row's function or class, which the row was read against.

    Attributes:
        source_hash: first 12 hex digits of the sha256 of the text (see ``hash_of``).
        versions: versions of megatron-core that have this text.
    """

    source_hash: str
    versions: tuple[str, ...]


@dataclass(frozen=True)
class Patch:
    """One Megatron function that is replaced or copied, or one Megatron class with specialized objects.

    Attributes:
        target: the definition, "module:function", "module:Class.method" or "module:Class".
        features: names of the features that need the row.
        why: reason why no argument, callable, spec or call site suffices.
        sources: source texts that the row was read against, for all versions; another text is refused.
        wrap: (original, runtime) -> replacement. None: the function stays, and ``copy_with_names`` runs a copy of it,
            or replaces its name in such a copy.
        aliases: other modules that import the same function by ``from ... import``.
        subclass: subclass that ``specialize`` gives to objects of the class.
    """

    target: str
    features: tuple[str, ...]
    why: str
    sources: tuple[Source, ...]
    wrap: Callable[[Function, Any], Function] | None = None
    aliases: tuple[str, ...] = ()
    subclass: Subclass | None = None

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hash of each source that the row was read against."""
        return tuple(source.source_hash for source in self.sources)


def source_hash(function: Function) -> str:
    """Return the first 12 hex digits of the sha256 of a function's source text; "none" without source."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "none"


def hash_of(patch: Patch, original: Any) -> str:
    """Return the hash of the source that a row depends on: the function, or the methods that its subclass overrides."""
    if patch.subclass is None:
        return source_hash(original)
    line = subclass_of(original, patch.subclass).__mro__
    ours = {name for kind in line[: line.index(original)] for name in vars(kind)}
    return hashlib.sha256("\n".join(_method_source(original, name) for name in sorted(ours)).encode()).hexdigest()[:12]


def _method_source(kind: type, name: str) -> str:
    """Return the source of a method with its decorators; "" for a name that no class of ``kind``'s package defines."""
    package = kind.__module__.partition(".")[0]
    owners = [base for base in kind.__mro__ if name in vars(base) and base.__module__.partition(".")[0] == package]
    return _methods(owners[0]).get(name, "") if owners else ""


@functools.cache
def _methods(owner: type) -> dict[str, str]:
    """Return the source of each method that a class defines.

    The text of the class is read, because decorators that compile hide the source of a method itself.
    """
    text = textwrap.dedent(inspect.getsource(owner))
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.ClassDef)
    lines, sources = text.splitlines(), {}
    for node in definition.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            sources[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return sources


def subclass_of(kind: type, subclass: Subclass) -> type:
    """Return the subclass of a Megatron class that a row names or creates."""
    return subclass if isinstance(subclass, type) else subclass(kind)


def specialize(instance: object, subclass: Subclass) -> None:
    """Turn an object of Megatron into an object of the subclass that the table has for its class."""
    instance.__class__ = subclass_of(type(instance), subclass)


def resolve_target(target: str) -> tuple[Holder, str, Function]:
    """Return (module or class, attribute, function or class) of a row's target. Raises ValueError if none exists."""
    module_name, _, path = target.partition(":")
    *classes, attribute = path.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(module_name))
        return owner, attribute, vars(owner)[attribute]
    except (ImportError, AttributeError, KeyError) as error:
        raise ValueError(f"{target} is not in megatron-core {installed_megatron()} ({error}); {REMEDY}") from error


def check_patch(patch: Patch) -> None:
    """Raise ValueError if a row's function has other source code, is already wrapped, or differs from an alias."""
    _, attribute, function = resolve_target(patch.target)
    if inspect.unwrap(function) is not function:  # the wrapper would hide another source
        raise ValueError(f"{patch.target} is wrapped already: install once, and leave out libraries that replace it")
    installed = hash_of(patch, function)
    if installed not in patch.hashes:
        raise ValueError(
            f"{patch.target} of megatron-core {installed_megatron()} has the source hash {installed}, which its row in "
            f"megatron/bytescale/patches.py does not have; {REMEDY}"
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
            check_patch(patch)
        for patch in patches:
            if patch.wrap is None:
                continue
            owner, attribute, original = resolve_target(patch.target)
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
    _, _, function = resolve_target(patch.target)
    original = getattr(function, "__wrapped__", function)
    state = "replaced" if original is not function else "copied" if patch.wrap is None else "untouched"
    if patch.subclass is not None:
        state = "specialized"
    found = hash_of(patch, original)
    if found not in patch.hashes:
        state = f"unknown source {found}"
    name, features = patch.target.partition(":")[2], ", ".join(patch.features)
    holders = ", ".join((patch.target.replace(":", "."), *patch.aliases))
    return f"{name:45} {state:10} {found}  {features}: {patch.why} [{holders}]"
