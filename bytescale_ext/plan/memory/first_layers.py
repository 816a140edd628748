"""Peak memory of stages that recompute their first layers, and keep the activations of the other layers.

The last layers run backward first. So a stage has two possible peaks: all its layers hold what they keep, or a
recomputed layer runs again after the last layers have freed the activations of its slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.memory.held import DeviceParts, peak_memory
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.step.sizes import Slicing


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """Stages that recompute their first layers.

    Attributes:
        kept: memory of the stages if all layers keep their activations.
        again: memory of the stages if all layers are recomputed.
        count: number of layers of each stage that are recomputed.
    """

    kept: StageMemory
    again: StageMemory
    count: int

    def parts(self, table: ShardTable, slicing: Slicing, cost: CostModel, num_chunks: int) -> list[DeviceParts]:
        """Return the bytes by kind of the fullest device of each stage. ``peak_memory`` explains the arguments."""
        found = []
        for stage in range(len(self.kept.num_layers)):
            peaks = [
                peak_memory(table, slicing, cost, memory, num_chunks, [stage]).stage_parts(memory)[stage]
                for memory in self._moments(stage, slicing, num_chunks)
            ]
            found.append(max(peaks, key=lambda peak: peak.total))
        return found

    def _moments(self, stage: int, slicing: Slicing, num_chunks: int) -> Iterator[StageMemory]:
        """Yield the memory when the last layer runs backward, and when a recomputed layer runs again.

        By then the last layers of the running virtual stage are free.
        """
        layers, again = self.kept.num_layers[stage], self.again if slicing.num_slices > 1 else self.again.unsliced()
        recomputed = min(layers, self.count)
        if not recomputed:
            yield self.kept
            return
        share = recomputed / layers
        of_kept = (1 - share) * self.kept.layer.activations
        mean = replace(again.layer, activations=share * again.layer.activations + of_kept, only_sliced=0.0)
        yield replace(self.kept, layer=replace(mean, head=self.kept.layer.head))
        assert again.passes is not None
        freed = replace(again.passes, again=again.passes.again - layers / num_chunks * of_kept)
        yield replace(again, layer=mean, passes=freed)
