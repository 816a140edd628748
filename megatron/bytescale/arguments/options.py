"""Reads Megatron's parsed arguments as frozen, typed values, and changes arguments.

The functions of a feature, and all code below the flag files, take such values instead of the namespace. Each kind of
value is a frozen dataclass whose fields have the names of arguments. So it also lists the arguments that its readers
depend on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Overrides = Mapping[str, object]
"""New values of Megatron's arguments, by name."""

NO_OVERRIDES: Overrides = {}


def options_of[Options: DataclassInstance](args: argparse.Namespace, kind: type[Options]) -> Options:
    """Return the arguments with the field names of ``kind``.

    A field with a default may be missing from the arguments, for example in an old checkpoint. Raises AttributeError if
    any other field is missing.
    """
    missing = {
        field.name
        for field in fields(kind)
        if (field.default is not MISSING or field.default_factory is not MISSING) and not hasattr(args, field.name)
    }
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind) if field.name not in missing})


def current[Options: DataclassInstance](kind: type[Options]) -> Options:
    """Return the running training's arguments with the field names of ``kind``.

    Megatron also stores its progress in the arguments, such as ``curr_iteration`` and ``consumed_train_samples``.
    """
    from megatron.training import get_args  # imports torch

    return options_of(get_args(), kind)


def override(args: argparse.Namespace, overrides: Overrides) -> None:
    """Set arguments. Only features use this, before and after Megatron checks its arguments."""
    vars(args).update(overrides)


def override_current(overrides: Overrides) -> None:
    """Set arguments of the running training."""
    from megatron.training import get_args  # imports torch

    override(get_args(), overrides)
