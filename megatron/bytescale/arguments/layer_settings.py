"""Settings of Megatron's layers that several tables of refusals read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Windows:
    """The sliding window of attention: the number of keys before and after a token that it attends to."""

    window_size: tuple[int, ...] | None

    def look_elsewhere(self) -> bool:
        """Return whether windows include later tokens, or no earlier tokens."""
        size = self.window_size
        return size is not None and len(size) > 0 and (len(size) != 2 or size[0] < 1 or size[1] != 0)


@dataclass(frozen=True)
class QueryGroups:
    """The groups of query heads that share keys and values."""

    num_attention_heads: int
    num_query_groups: int | None

    def are_uneven(self) -> bool:
        """Return whether groups have different numbers of heads."""
        return self.num_attention_heads % (self.num_query_groups or 1) != 0


@dataclass(frozen=True)
class Balancing:
    """The methods that balance the loads of experts: one method, or several together."""

    moe_router_load_balancing_type: str | list[str] = "aux_loss"

    @property
    def ways(self) -> set[str]:
        """The names of the methods."""
        types = self.moe_router_load_balancing_type
        return set(types if isinstance(types, list) else [types])

    def is_beyond(self, *allowed: str) -> bool:
        """Return whether any method is not in ``allowed``."""
        return bool(self.ways - set(allowed))


@dataclass(frozen=True)
class RouterChanges:
    """Losses and updates of routers that count tokens."""

    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_enable_expert_bias: bool = False

    def any(self) -> bool:
        """Return whether the tokens of a step change a router other than by the loss of the labels."""
        balancing = self.moe_aux_loss_coeff
        coefficients = [self.moe_z_loss_coeff, *(balancing if isinstance(balancing, list) else [balancing])]
        return any(coefficients) or self.moe_router_enable_expert_bias


@dataclass(frozen=True)
class AttentionChoice:
    """Megatron's implementation of attention."""

    attention_backend: Enum

    def is_chosen(self) -> bool:
        """Return whether an implementation is requested by name."""
        return self.attention_backend.name != "auto"
