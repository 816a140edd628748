"""Torch's Adam with the state layout of the Adam of TransformerEngine and Apex, which it replaces.

TransformerEngine and Apex keep the step count in each parameter group, as ``step``; torch keeps it for each parameter.
Megatron saves and loads the count where the installed package keeps it.
"""

from __future__ import annotations

from typing import Final

import torch

TAKEN_OVER: Final = ("lr", "betas", "eps", "weight_decay")


class GroupCountingAdam(torch.optim.Adam):
    """Adam that keeps the step count per parameter group, not per parameter. A group without updates has no count."""

    @classmethod
    def taking_over(cls, other: torch.optim.Optimizer, decoupled_weight_decay: bool) -> GroupCountingAdam:
        """Return an optimizer with the parameter groups of ``other``, which must not have states yet."""
        defaults = {name: other.defaults[name] for name in TAKEN_OVER}
        optimizer = cls([torch.zeros(1)], decoupled_weight_decay=decoupled_weight_decay, **defaults)
        optimizer.param_groups = other.param_groups
        optimizer._complete_groups()
        return optimizer

    def __setstate__(self, state: dict[str, object]) -> None:
        """Set loaded states; their groups may come from the optimizer of the other package."""
        torch.optim.Optimizer.__setstate__(self, state)
        self._complete_groups()

    def _complete_groups(self) -> None:
        """Add the default of each hyperparameter that a group lacks."""
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def update_counts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the number of updates of each parameter so far, as scalars in the optimizer's order."""
    in_groups = isinstance(optimizer, GroupCountingAdam)
    return [
        torch.tensor(float(group.get("step", 0))) if in_groups else optimizer.state[parameter]["step"].clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def count_update(optimizer: torch.optim.Optimizer) -> None:
    """Increment the step count of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, GroupCountingAdam):
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
            continue
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] += 1


def store_count(optimizer: torch.optim.Optimizer, group: dict[str, object], parameter: torch.Tensor) -> None:
    """Store the step count of a parameter of any shape where the optimizer keeps it.

    A new parameter starts at 0. A count loaded from a checkpoint of torch's Adam moves to the parameter group.
    """
    state = optimizer.state[parameter]
    if not isinstance(optimizer, GroupCountingAdam):
        state["step"] = state["step"].clone() if "step" in state else torch.tensor(0.0)
    elif "step" in state:  # from a checkpoint of torch's Adam
        group["step"] = int(state.pop("step"))
