"""A variant of Megatron's linear layer for experts that cannot train with the original."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import RowParallelLinear


class ExpertRowParallelLinear(RowParallelLinear):
    """Megatron's down-projection of an expert, [..., in] to [..., out], which allows biases to be added in place.

    Megatron's experts add their biases in place. If a rank has all experts, each of them whole, Megatron's layer
    reduces over that single rank and returns a view, which autograd does not allow to change in place. This layer skips
    that reduction.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        assert self.is_expert, "only layers of experts add their own biases"
        self.explicit_expert_comm |= self.tp_group.size() == 1
