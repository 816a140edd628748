"""How a function of Megatron is replaced, checked and put back. Knows no feature.

A ``Patch`` row names the function, holds the wrapper and says why no hook of Megatron's does. All rows are
checked against the installed source before any is applied; nothing else may ``setattr`` on Megatron.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One replaced function.

    Attributes:
        target: "module:attribute" where the function is defined.
        wrap: (original, runtime) -> replacement.
        feature: the flag that switches it on.
        why: why no argument, callable, spec or call site can do it.
        source_hash: first 12 hex digits of sha256 of ``inspect.getsource(original)``.
        aliases: other modules that hold the same function by ``from ... import``.
    """

    target: str
    wrap: Callable[[Callable[..., Any], Any], Callable[..., Any]]
    feature: str
    why: str
    source_hash: str
    aliases: tuple[str, ...] = ()


def source_hash(function: Callable[..., Any]) -> str:
    """First 12 hex digits of the sha256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


def resolve(target: str) -> tuple[Any, str, Callable[..., Any]]:
    """(owner, attribute, function) of a row's target. Raises ValueError when it is not there."""
    module_name, _, attribute = target.partition(":")
    try:
        owner = importlib.import_module(module_name)
        return owner, attribute, getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{target} is not in the installed Megatron ({error}); install megatron-core==0.19.2"
        ) from error


def check(patch: Patch) -> None:
    """Refuse a row whose function is not the one it was written for, or an alias that holds another one."""
    _, attribute, function = resolve(patch.target)
    if inspect.unwrap(function) is not function:  # its source would be read through the wrapper
        raise ValueError(f"{patch.target} is wrapped already: install once, and leave out libraries that replace it")
    found = source_hash(function)
    if found != patch.source_hash:
        raise ValueError(
            f"{patch.target} has source hash {found}, the patch was written for {patch.source_hash}; "
            "install megatron-core==0.19.2, or review the row in megatron/bytescale/patches.py"
        )
    for alias in patch.aliases:
        if getattr(importlib.import_module(alias), attribute, None) is not function:
            raise ValueError(f"{alias}.{attribute} is not {patch.target}; another library has replaced it")


@dataclass
class Installation:
    """What is replaced right now; ``uninstall`` puts it back."""

    originals: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)

    def install(self, patches: Sequence[Patch], runtime: Any) -> None:
        """Check every row, then apply every row. Raises ValueError before anything is replaced."""
        for patch in patches:
            check(patch)
        for patch in patches:
            owner, attribute, original = resolve(patch.target)
            replacement = functools.wraps(original)(patch.wrap(original, runtime))
            for holder in (owner, *(importlib.import_module(alias) for alias in patch.aliases)):
                self.originals.append((holder, attribute, original))
                setattr(holder, attribute, replacement)

    def uninstall(self) -> None:
        """Put every original back, last replaced first."""
        while self.originals:
            setattr(*self.originals.pop())

    def names(self) -> list[str]:
        """ "module.attribute" of everything replaced."""
        return [f"{holder.__name__}.{attribute}" for holder, attribute, _ in self.originals]


def describe(patch: Patch) -> str:
    """One row of the table, with whether the installed Megatron is the one expected."""
    _, _, function = resolve(patch.target)
    original = getattr(function, "__wrapped__", function)
    state = "replaced" if original is not function else "untouched"
    if source_hash(original) != patch.source_hash:
        state = f"unknown source {source_hash(original)}"
    holders = ", ".join((patch.target.replace(":", "."), *patch.aliases))
    return (
        f"{patch.target.partition(':')[2]:32} {state:10} {patch.source_hash}  {patch.feature}: {patch.why} [{holders}]"
    )
