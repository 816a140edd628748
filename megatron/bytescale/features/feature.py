"""The type of a row of the feature table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import Condition
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides, options_of
from megatron.bytescale.arguments.refusals import Refusal

if TYPE_CHECKING:  # flags are added before torch and Megatron are imported
    from _typeshed import DataclassInstance

    from megatron.bytescale.registry import Patch
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


COST_FLAG: Final = "--cost-file"
"""Belongs to no feature; one that reads it only sometimes borrows it."""


def _nothing(options: object) -> Overrides:
    return NO_OVERRIDES


def _no_flags(options: object) -> tuple[str, ...]:
    return ()


def _no_patches() -> tuple[Patch, ...]:
    return ()


@dataclass(frozen=True)
class Feature[Options: DataclassInstance]:
    """One thing that a run can do beyond Megatron.

    Attributes:
        name: key of its configuration in ``RunConfig``, of its patch rows and of its column in the refusals.
        flag: the flag that switches it on, as messages name it.
        summary: what it does, in a few words.
        add_arguments: adds its flags to a parser; imports neither torch nor Megatron.
        is_on: the condition on parsed arguments that switches it on.
        options: the arguments that its functions take, as a frozen dataclass: a field has the name of an argument.
        resolve: returns its frozen configuration from checked options and the run so far. Raises ValueError.
        build: changes what Megatron's ``pretrain`` is given.
        before_checks: checks options before Megatron checks its arguments, and returns the arguments to override.
        after_checks: returns the arguments to override after Megatron has checked them.
        needs: what its other flags need, as messages name it; default: ``flag``.
        requires: names of features that must be on too.
        borrows: returns the flags of other features that it reads, which may be given although those features are off.
        reads_cost: whether it plans with the costs of ``--cost-file``.
        refusals: the settings that it refuses; another feature may add rows for it.
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
    needs: str = ""
    requires: tuple[str, ...] = ()
    borrows: Callable[[Options], tuple[str, ...]] = _no_flags
    reads_cost: bool = False
    refusals: tuple[Refusal, ...] = ()
    patches: Callable[[], tuple[Patch, ...]] = _no_patches

    def actions(self) -> list[argparse.Action]:
        """Return its flags as argparse actions."""
        parser = argparse.ArgumentParser(add_help=False)
        self.add_arguments(parser)
        return parser._actions

    def read(self, args: argparse.Namespace) -> Options:
        """Return its options."""
        return options_of(args, self.options)
