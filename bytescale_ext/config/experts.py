"""Settings of experts: the record of their loads, the placement that follows them, and where they begin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.replay import Placing
from bytescale_ext.plan.experts.trace import TraceHead


@dataclass(frozen=True)
class TraceTo:
    """A record of the loads of experts.

    Attributes:
        path: file that lines are appended to.
        head: its first line.
    """

    path: Path
    head: TraceHead


@dataclass(frozen=True)
class PlacementConfig:
    """Experts in slots.

    Attributes:
        num_experts: of each layer.
        num_ranks: that share them.
        placing: how replicas are placed; its cost is of one micro-batch.
        measures: the cost is an assumption, and is measured when training starts.
    """

    num_experts: int
    num_ranks: int
    placing: Placing
    measures: bool = False

    def with_cost(self, cost: ExpertCost) -> PlacementConfig:
        """Return the configuration with a measured cost of one micro-batch."""
        return replace(self, placing=replace(self.placing, cost=cost), measures=False)


@dataclass(frozen=True)
class UpcycleFrom:
    """A dense checkpoint that experts are made from.

    Attributes:
        load: folder of the dense checkpoint.
        save: folder of the new ones.
        ffn_hidden: width of the dense model's MLPs.
    """

    load: Path
    save: Path
    ffn_hidden: int
