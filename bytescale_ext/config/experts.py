"""Settings of experts: trace of their loads, placement, and creation from a dense checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.replay import PlacementSettings
from bytescale_ext.plan.experts.trace import TraceHead


@dataclass(frozen=True)
class TraceTo:
    """Output of a trace of expert loads.

    Attributes:
        path: file to which lines are appended.
        head: header of the trace, its first line.
    """

    path: Path
    head: TraceHead


@dataclass(frozen=True)
class PlacementConfig:
    """Placement of experts in slots.

    Attributes:
        num_experts: number of experts of each layer.
        num_ranks: number of ranks that share the experts of a layer.
        placing: settings of the placement, with the cost of one micro-batch.
        measures: whether the cost is an assumption that a measurement at the start of training replaces.
    """

    num_experts: int
    num_ranks: int
    placing: PlacementSettings
    measures: bool = False

    def with_cost(self, cost: ExpertCost) -> PlacementConfig:
        """Return the configuration with a measured cost of one micro-batch."""
        return replace(self, placing=replace(self.placing, cost=cost), measures=False)


@dataclass(frozen=True)
class UpcycleFrom:
    """Conversion of a dense checkpoint to experts.

    Attributes:
        load: folder of the dense checkpoint.
        save: folder of the new checkpoints.
        ffn_hidden: width of the dense model's MLPs.
    """

    load: Path
    save: Path
    ffn_hidden: int
