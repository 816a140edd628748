"""The errors a user meets. Bad input is a plain ``ValueError``; a broken plan is a ``PlanError``."""


class PlanError(ValueError):
    """A plan breaks one of its laws. The message holds the printed plan with the bad row marked."""


class OutOfTime(RuntimeError):
    """A planner was told to stop before it had a plan; ``HdpPlanner.fallback`` has one at once."""
