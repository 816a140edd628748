"""Errors that a user can see. Bad input raises a plain ``ValueError``, a broken plan a ``PlanError``."""

from typing import Final

LONGEST: Final = 4000
"""Most characters of a printed error: texts of files can be of any length."""


class PlanError(ValueError):
    """A plan breaks one of its laws. The message holds the printed plan with the bad row marked."""


class OutOfTime(RuntimeError):
    """A planner reached its time limit before it had a plan. ``HdpPlanner.fallback`` returns a plan immediately."""


def one_line(text: object, most: int | None = None) -> str:
    """Return a text, or the message of an error, in one line of at most ``most`` characters; None: of any length."""
    return " ".join(str(text).split())[:most]
