"""The errors that a user can see. Bad input is a plain ``ValueError``; a broken plan is a ``PlanError``."""


class PlanError(ValueError):
    """A plan breaks one of its laws. The message holds the printed plan with the bad row marked."""


class OutOfTime(RuntimeError):
    """A planner reached its time limit before it had a plan; ``HdpPlanner.fallback`` returns one immediately."""
