"""Conditions on parsed arguments, as values that combine with ``&``, ``|`` and ``~``.

An argument that Megatron's parser has not set counts as None.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.bytescale.arguments.options import options_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Condition:
    """A condition on parsed arguments.

    Attributes:
        holds: whether arguments meet it.
    """

    holds: Callable[[argparse.Namespace], bool]

    def __call__(self, args: argparse.Namespace) -> bool:
        """Return whether arguments meet the condition."""
        return self.holds(args)

    def __and__(self, other: Condition) -> Condition:
        """Return the condition that both hold; ``other`` is not looked at if this one does not hold."""
        return Condition(lambda args: self(args) and other(args))

    def __or__(self, other: Condition) -> Condition:
        """Return the condition that one of them holds."""
        return Condition(lambda args: self(args) or other(args))

    def __invert__(self) -> Condition:
        """Return the condition that this one does not hold."""
        return Condition(lambda args: not self(args))


def given(name: str) -> Condition:
    """Return the condition that an argument has a true value: not None, False, 0 or empty."""
    return Condition(lambda args: bool(getattr(args, name, None)))


def chosen(name: str) -> Condition:
    """Return the condition that a flag is on the command line: its argument is neither None nor False, but may be 0."""
    return ~Condition(lambda args: getattr(args, name, None) is None or getattr(args, name) is False)


def equals(name: str, *values: object) -> Condition:
    """Return the condition that an argument has one of these values."""
    return Condition(lambda args: getattr(args, name, None) in values)


def above(name: str, limit: float) -> Condition:
    """Return the condition that an argument is a number above ``limit``; None counts as 0."""
    return Condition(lambda args: (getattr(args, name, None) or 0) > limit)


def where[Options: DataclassInstance](kind: type[Options], holds: Callable[[Options], bool]) -> Condition:
    """Return a condition on several arguments: those that have the names of the fields of ``kind``."""
    return Condition(lambda args: holds(options_of(args, kind)))


IS_LOCAL = equals("transformer_impl", "local")
"""Layers are Megatron's own, without TransformerEngine."""

IS_CUT = ~equals("seq1f1b_slices", None, 1)
"""Micro-batches are cut into slices."""

PLANS_ACTIVATIONS = ~equals("activation_policy", "none") | chosen("swap_fraction") | chosen("recompute_fraction")
"""A policy, or given shares, plan what layers keep."""
