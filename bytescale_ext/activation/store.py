"""The state that the layers of a process share: the plan of the current micro-batch, the host arena, the counts."""

from __future__ import annotations

import weakref
from dataclasses import replace

from bytescale_ext.activation.buffers import RoundingBuffers
from bytescale_ext.activation.counts import Counts
from bytescale_ext.activation.link import Link
from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.plan.activation.plan import ActivationPlan


class ActivationStore:
    """The shared state of a model's layers.

    Attributes:
        plan: of the next micro-batch; set it before each forward pass.
        link: to the host arena.
        num_layers: of the whole model; layers count from 1.
        counts: of bytes moved and rebuilt.
        buffers: device memory into which swapped layers are read back; None: new memory each time.
    """

    def __init__(self, plan: ActivationPlan, link: Link, num_layers: int) -> None:
        self.plan = plan
        self.link = link
        self.num_layers = num_layers
        self.counts = Counts()
        self.buffers: RoundingBuffers | None = None
        self._records: weakref.WeakSet[LayerRecord] = weakref.WeakSet()
        self._latest: tuple[int, weakref.ref[LayerRecord]] | None = None

    def is_planned(self, layer_number: int) -> bool:
        """Return whether the plan changes anything for a layer: it is not off, and the layer is not resident."""
        return not self.plan.is_off and layer_number <= self.num_layers - self.plan.resident_layers

    def before_resident(self, layer_number: int) -> LayerRecord | None:
        """Prepare for a layer that is not under the plan; call it before the layer runs forward.

        The first such layer runs while the last swapped layer is written. The second waits for that write, so only two
        whole layers are on the device, not three. Returns the record of the layer before if it is under the plan: it
        must be read back when this layer's backward pass starts.
        """
        behind = layer_number - self._latest[0] if self._latest is not None else 0
        if self._latest is not None and behind == 1:
            return self._latest[1]()
        if behind == 2:
            self.link.settle()
        self._latest = None  # a third layer, or another micro-batch
        return None

    def new_record(self, layer_number: int, num_rows: int, parameters: frozenset[int]) -> LayerRecord:
        """Make the record of a layer that is about to run forward."""
        if self.buffers is not None:
            self.buffers.release()
        record = LayerRecord(self.plan, num_rows, self.link, parameters, self.counts, self.buffers)
        if self._latest is not None and self._latest[0] == layer_number - 1:
            record.previous = self._latest[1]
        self._records.add(record)
        self._latest = layer_number, weakref.ref(record)
        return record

    def take_counts(self) -> Counts:
        """Return the counts since the last call, and reset them."""
        counts = replace(self.counts)
        self.counts.__init__()  # type: ignore[misc]
        return counts

    def check_empty(self) -> None:
        """Assert, after the last backward pass of a step, that no tensor is saved and the arena is empty."""
        waiting = sum(record.is_waiting for record in self._records)
        assert not waiting and not self.link.used_bytes, f"{waiting=} {self.link.used_bytes=}"
        if self.buffers is not None:
            self.buffers.release()
