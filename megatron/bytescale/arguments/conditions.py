"""Conditions on parsed arguments, as values that can be combined with ``&``, ``|`` and ``~``.

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
        holds: function that returns whether arguments meet the condition.
    """

    holds: Callable[[argparse.Namespace], bool]

    def __call__(self, args: argparse.Namespace) -> bool:
        """Return whether arguments meet the condition."""
        return self.holds(args)

    def __and__(self, other: Condition) -> Condition:
        """Return the condition that both hold; ``other`` is only evaluated if this condition holds."""
        return Condition(lambda args: self(args) and other(args))

    def __or__(self, other: Condition) -> Condition:
        """Return the condition that at least one of the two holds."""
        return Condition(lambda args: self(args) or other(args))

    def __invert__(self) -> Condition:
        """Return the negated condition."""
        return Condition(lambda args: not self(args))


def given(name: str) -> Condition:
    """Return the condition that an argument has a true value: not None, False, 0 or empty."""
    return Condition(lambda args: bool(getattr(args, name, None)))


def chosen(name: str) -> Condition:
    """Return the condition that the command line has a flag: its argument is not None or False, but may be 0."""
    return ~Condition(lambda args: getattr(args, name, None) is None or getattr(args, name) is False)


def equals(name: str, *values: object) -> Condition:
    """Return the condition that an argument has one of these values."""
    return Condition(lambda args: getattr(args, name, None) in values)


def includes(name: str, value: object) -> Condition:
    """Return the condition that an argument is a list with this value; None counts as an empty list."""
    return Condition(lambda args: value in (getattr(args, name, None) or ()))


def above(name: str, limit: float) -> Condition:
    """Return the condition that an argument is a number above ``limit``; None counts as 0."""
    return Condition(lambda args: (getattr(args, name, None) or 0) > limit)


def where[Options: DataclassInstance](kind: type[Options], holds: Callable[[Options], bool]) -> Condition:
    """Return a condition on several arguments, given by the field names of ``kind``."""
    return Condition(lambda args: holds(options_of(args, kind)))


IS_LOCAL = equals("transformer_impl", "local")
"""Megatron's own layers are used, without TransformerEngine."""

NCCLEP = equals("moe_token_dispatcher_type", "flex") & equals("moe_flex_dispatcher_backend", "ncclep")
"""Tokens go to experts through NCCL's own kernels of expert parallelism."""

IS_CUT = ~equals("seq1f1b_slices", None, 1)
"""Micro-batches run in slices."""

PLANS_ACTIVATIONS = ~equals("activation_policy", "none") | chosen("swap_fraction") | chosen("recompute_fraction")
"""A policy or given shares determine which tensors layers keep."""
