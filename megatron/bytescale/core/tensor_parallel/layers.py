"""Megatron's linear layers, where one of them cannot train as it is."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import RowParallelLinear


class ExpertRowParallelLinear(RowParallelLinear):
    """Megatron's down-projection of an expert, [..., in] to [..., out], to whose output biases can be added in place.

    Megatron's experts add theirs so. Where a rank has all experts and all of each, Megatron's layer sums up over that
    one rank and returns a view, which autograd forbids to change in place. This layer leaves that sum out.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert self.is_expert, "others leave their biases to what follows"
        self.explicit_expert_comm |= self.tp_group.size() == 1
