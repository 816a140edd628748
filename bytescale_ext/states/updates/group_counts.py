"""Torch's Adam in place of the Adam of TransformerEngine or Apex, with states as those have them.

Both count updates in parameter groups, as ``step``, and torch for each parameter. Megatron saves and loads what the
package that is installed counts. Pages are updated by torch's kernels all the same.
"""

from __future__ import annotations

from typing import Final

import torch

TAKEN_OVER: Final = ("lr", "betas", "eps", "weight_decay")


class GroupCountingAdam(torch.optim.Adam):
    """Adam whose states hold no number of updates; each parameter group does, once it was updated."""

    @classmethod
    def taking_over(cls, other: torch.optim.Optimizer, decoupled_weight_decay: bool) -> GroupCountingAdam:
        """Return an optimizer with the same parameter groups as another one that has no states yet."""
        figures = {name: other.defaults[name] for name in TAKEN_OVER}
        made = cls([torch.zeros(1)], decoupled_weight_decay=decoupled_weight_decay, **figures)
        made.param_groups = other.param_groups
        made._complete_groups()
        return made

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take loaded states, whose groups may be those of the other optimizer."""
        torch.optim.Optimizer.__setstate__(self, state)
        self._complete_groups()

    def _complete_groups(self) -> None:
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def counts_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the number of updates of each parameter so far, scalars, in the order of the optimizer."""
    in_groups = isinstance(optimizer, GroupCountingAdam)
    return [
        torch.tensor(float(group.get("step", 0))) if in_groups else optimizer.state[parameter]["step"].clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def count_update(optimizer: torch.optim.Optimizer) -> None:
    """Count an update of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, GroupCountingAdam):
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
            continue
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] += 1


def take_count(optimizer: torch.optim.Optimizer, group: dict[str, object], parameter: torch.Tensor) -> None:
    """Have the count of a parameter of any shape, new or loaded, where the optimizer keeps it."""
    state = optimizer.state[parameter]
    if not isinstance(optimizer, GroupCountingAdam):
        state["step"] = state["step"].clone() if "step" in state else torch.tensor(0.0)
    elif "step" in state:  # a checkpoint of torch's
        group["step"] = int(state.pop("step"))
