"""Read Megatron's parsed arguments as frozen, typed values, and change them.

The functions of a feature, and everything below the flag files, take such values and never the namespace. A kind of
value is a frozen dataclass whose fields have the names of arguments, so it also lists what its readers depend on.
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
    """Return the arguments that have the names of the fields of ``kind``.

    A field with a default may be missing from the arguments, for example from those of an old checkpoint. Raises
    AttributeError if another one is missing.
    """
    missing = {
        field.name
        for field in fields(kind)
        if (field.default is not MISSING or field.default_factory is not MISSING) and not hasattr(args, field.name)
    }
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind) if field.name not in missing})


def current[Options: DataclassInstance](kind: type[Options]) -> Options:
    """Return the arguments of the running training that have the names of the fields of ``kind``.

    Megatron also keeps its progress there, such as ``curr_iteration`` and ``consumed_train_samples``.
    """
    from megatron.training import get_args  # with torch

    return options_of(get_args(), kind)


def override(args: argparse.Namespace, overrides: Overrides) -> None:
    """Set arguments. Only features ask for this, before and after Megatron checks its arguments."""
    vars(args).update(overrides)


def override_current(overrides: Overrides) -> None:
    """Set arguments of the running training."""
    from megatron.training import get_args  # with torch

    override(get_args(), overrides)
