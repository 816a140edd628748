"""Settings of Megatron's layers that several tables of refusals look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Windows:
    """The sliding window of attention: keys before a token and behind it that it sees."""

    window_size: tuple[int, ...] | None

    def look_elsewhere(self) -> bool:
        """Return whether windows reach ahead of a token, or not back."""
        size = self.window_size
        return size is not None and len(size) > 0 and (len(size) != 2 or size[0] < 1 or size[1] != 0)


@dataclass(frozen=True)
class QueryGroups:
    """Heads of queries that share keys and values."""

    num_attention_heads: int
    num_query_groups: int | None

    def are_uneven(self) -> bool:
        """Return whether groups differ in heads."""
        return self.num_attention_heads % (self.num_query_groups or 1) != 0


@dataclass(frozen=True)
class Balancing:
    """How the loads of experts are balanced: by one way, or by several together."""

    moe_router_load_balancing_type: str | list[str]

    @property
    def ways(self) -> set[str]:
        """The names of the ways."""
        types = self.moe_router_load_balancing_type
        return set(types if isinstance(types, list) else [types])

    def is_beyond(self, *allowed: str) -> bool:
        """Return whether there is a way that is not among ``allowed``."""
        return bool(self.ways - set(allowed))


@dataclass(frozen=True)
class Backend:
    """Megatron's implementation of attention."""

    attention_backend: Enum

    def is_chosen(self) -> bool:
        """Return whether one is requested by name."""
        return self.attention_backend.name != "auto"
