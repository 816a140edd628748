"""The type of a row of the feature table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import Condition, given
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides, options_of
from megatron.bytescale.arguments.refusals import Refusal

if TYPE_CHECKING:  # flags are added before any import of torch and Megatron
    from _typeshed import DataclassInstance

    from megatron.bytescale.registry import Patch
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


COST_FLAG: Final = "--cost-file"
"""Flag that belongs to no feature; a feature that reads it only sometimes borrows it."""


def _nothing(options: object) -> Overrides:
    return NO_OVERRIDES


def _no_flags(options: object) -> tuple[str, ...]:
    return ()


def _no_patches() -> tuple[Patch, ...]:
    return ()


@dataclass(frozen=True)
class Feature[Options: DataclassInstance]:
    """One capability of a run beyond Megatron.

    Attributes:
        name: key of its configuration in ``RunConfig``, of its patch rows and of its column in the refusals.
        flag: flag that enables it, as named in messages.
        summary: short description.
        add_arguments: adds its flags to a parser; imports neither torch nor Megatron.
        is_on: condition on parsed arguments that enables it.
        options: frozen dataclass of the arguments that its functions take; fields have the names of arguments.
        resolve: returns its frozen configuration from checked options and the run so far. Raises ValueError.
        build: changes the arguments of Megatron's ``pretrain``.
        before_checks: checks options before Megatron checks its arguments, and returns the arguments to override.
        after_checks: returns the arguments to override after Megatron has checked them.
        other_flags: flags that enable it without ``flag``.
        needs: flag or setting that its other flags need, as named in messages; default: ``flag``.
        requires: names of features that must also be enabled.
        borrows: returns the flags of other features that it reads; they may be given even if those features are off.
        reads_cost: whether it plans with the costs of ``--cost-file``.
        refusals: settings that it refuses; another feature may add rows for it.
        patches: returns its patch rows in addition to the rows of ``patches.py``.
    """

    name: str
    flag: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    is_on: Condition
    options: type[Options]
    resolve: Callable[[Options, RunConfig], object]
    build: Callable[[Training, Runtime], Training]
    before_checks: Callable[[Options], Overrides] = _nothing
    after_checks: Callable[[Options], Overrides] = _nothing
    other_flags: tuple[str, ...] = ()
    needs: str = ""
    requires: tuple[str, ...] = ()
    borrows: Callable[[Options], tuple[str, ...]] = _no_flags
    reads_cost: bool = False
    refusals: tuple[Refusal, ...] = ()
    patches: Callable[[], tuple[Patch, ...]] = _no_patches

    @property
    def switches(self) -> tuple[str, ...]:
        """Flags that switch it on."""
        return (self.flag, *self.other_flags)

    def switch(self, args: argparse.Namespace) -> str:
        """Return the flag that switches it on in these arguments; ``flag`` if it is off."""
        given_flags = (flag for flag in self.switches if given(flag[2:].replace("-", "_"))(args))
        return next(given_flags, self.flag) if self.other_flags else self.flag

    def actions(self) -> list[argparse.Action]:
        """Return its flags as argparse actions."""
        parser = argparse.ArgumentParser(add_help=False)
        self.add_arguments(parser)
        return parser._actions

    def read(self, args: argparse.Namespace) -> Options:
        """Return its options."""
        return options_of(args, self.options)
