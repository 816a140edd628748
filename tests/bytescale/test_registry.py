from __future__ import annotations

import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron.bytescale.registry import Installation, Patch, Source, check_patch, describe, source_hash, specialize
from megatron.bytescale.versions import TESTED, installed_megatron


def shout(words: str) -> str:
    """A function to replace."""
    return words.upper()


def whisper(words: str) -> str:
    return words.lower()


def wrap_twice(original: Callable[..., Any], runtime: Any) -> Callable[..., Any]:
    def twice(words: str) -> Any:
        return runtime + original(words) + original(words)

    return twice


@pytest.fixture
def modules() -> Iterator[dict[str, types.ModuleType]]:
    """Make a module ``upstream`` with shout and whisper, and a module ``holder`` that imports both."""
    made = {name: types.ModuleType(name) for name in ("upstream", "holder")}
    for module in made.values():
        module.shout, module.whisper = shout, whisper  # type: ignore[attr-defined]
    sys.modules.update(made)
    yield made
    for name in made:
        del sys.modules[name]


def source(*hashes: str) -> tuple[Source, ...]:
    return tuple(Source(one, (f"0.{number}",)) for number, one in enumerate(hashes))


def row(target: str = "upstream:shout", function: Callable[..., Any] = shout, **changes: Any) -> Patch:
    values = {"wrap": wrap_twice, "features": ("loud", "proud"), "why": "no hook",
              "sources": source(source_hash(function)), "aliases": ("holder",)}  # fmt: skip
    return Patch(target, **{**values, **changes})


ROWS = (row(), row("upstream:whisper", whisper))


def test_install_replaces_in_every_holder_and_uninstall_restores_identity(modules: dict[str, Any]) -> None:
    installation = Installation()
    installation.install(ROWS, ">")
    for module in modules.values():
        assert module.shout("a") == ">AA"
        assert module.whisper("B") == ">bb"
        assert module.shout.__doc__ == shout.__doc__
        assert module.shout.__wrapped__ is shout
    assert modules["upstream"].shout is modules["holder"].shout
    assert installation.names() == ["upstream.shout", "holder.shout", "upstream.whisper", "holder.whisper"]
    installation.uninstall()
    for module in modules.values():
        assert module.shout is shout
        assert module.whisper is whisper
    assert installation.names() == []
    installation.uninstall()


def assert_untouched(modules: dict[str, Any], installation: Installation) -> None:
    assert installation.names() == []
    for module in modules.values():
        assert module.shout is shout
        assert module.whisper is whisper


def test_another_source_refuses_before_anything_is_replaced(modules: dict[str, Any]) -> None:
    installation = Installation()
    with pytest.raises(ValueError, match="whisper") as refusal:
        installation.install((ROWS[0], row("upstream:whisper", whisper, sources=source("0123456789ab"))), ">")
    message = str(refusal.value)
    version = re.escape(str(installed_megatron()))
    assert re.match(f"upstream:whisper of megatron-core {version} has the source hash {source_hash(whisper)}", message)
    for words in ("patches.py", f"install megatron-core=={TESTED[-1]}", "docs/guide/upgrade.md", "make next"):
        assert words in message
    assert_untouched(modules, installation)


def test_a_row_takes_the_source_that_is_installed(modules: dict[str, Any]) -> None:
    check_patch(row(sources=source("0123456789ab", source_hash(shout))))


def test_an_alias_that_holds_another_function_refuses_before_anything_is_replaced(modules: dict[str, Any]) -> None:
    modules["holder"].whisper = foreign = str.strip
    installation = Installation()
    with pytest.raises(ValueError, match=r"holder\.whisper is not upstream:whisper; another library"):
        installation.install(ROWS, ">")
    assert modules["holder"].whisper is foreign
    modules["holder"].whisper = whisper
    assert_untouched(modules, installation)


def test_an_alias_without_the_function_is_refused(modules: dict[str, Any]) -> None:
    del modules["holder"].shout
    with pytest.raises(ValueError, match=r"holder\.shout"):
        check_patch(ROWS[0])


@pytest.mark.parametrize("target", ["upstream:sing", "no_such_module:shout"])
def test_what_is_not_there_is_named(modules: dict[str, Any], target: str) -> None:
    installation = Installation()
    with pytest.raises(ValueError, match=f"{target} is not in megatron-core .*install megatron-core=="):
        installation.install((*ROWS, row(target)), ">")
    assert_untouched(modules, installation)


def test_a_second_install_is_refused_and_the_first_stays(modules: dict[str, Any]) -> None:
    first, second = Installation(), Installation()
    first.install(ROWS, ">")
    replaced = modules["upstream"].shout
    with pytest.raises(ValueError, match="upstream:shout is wrapped already: install once"):
        second.install(ROWS, "<")
    assert second.names() == []
    assert modules["upstream"].shout is replaced
    first.uninstall()
    assert_untouched(modules, first)


def test_describe_tells_the_state(modules: dict[str, Any]) -> None:
    line = describe(ROWS[0])
    for words in ("shout", "untouched", source_hash(shout), "loud, proud: no hook", "[upstream.shout, holder]"):
        assert words in line
    installation = Installation()
    installation.install(ROWS, ">")
    assert " replaced " in describe(ROWS[0])
    installation.uninstall()
    assert " untouched " in describe(ROWS[0])
    assert f"unknown source {source_hash(shout)}" in describe(row(sources=source("0" * 12)))
    modules["upstream"].shout = whisper
    assert f"unknown source {source_hash(whisper)}" in describe(ROWS[0])


class Bell:
    """Class with some objects that become objects of ``LoudBell``."""

    def __init__(self) -> None:
        self.pitch = "low"

    def ring(self) -> str:
        return self.pitch

    def stop(self) -> None:
        """Do nothing."""


class LoudBell(Bell):
    def ring(self) -> str:
        return super().ring().upper()


def test_a_row_of_a_class_depends_on_the_methods_that_its_subclass_overrides(modules: dict[str, Any]) -> None:
    modules["upstream"].Bell = Bell  # type: ignore[attr-defined]
    ring = "    def ring(self) -> str:\n        return self.pitch"
    sources = [ring if name == "ring" else "" for name in sorted(vars(LoudBell))]
    expected = hashlib.sha256("\n".join(sources).encode()).hexdigest()[:12]
    bell_row = row("upstream:Bell", wrap=None, aliases=(), subclass=LoudBell, sources=source(expected))
    check_patch(bell_row)
    with pytest.raises(ValueError, match=f"upstream:Bell of megatron-core .* has the source hash {expected}, which"):
        check_patch(replace(bell_row, sources=source("0" * 12)))
    assert " specialized " in describe(bell_row)


@pytest.mark.parametrize("subclass", [LoudBell, lambda kind: LoudBell], ids=["class", "function"])
def test_specialize_keeps_the_state_of_an_object_and_leaves_others_alone(subclass: Any) -> None:
    bell, other = Bell(), Bell()
    specialize(bell, subclass)
    assert (bell.ring(), other.ring()) == ("LOW", "low")
    assert type(other) is Bell
