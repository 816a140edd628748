"""All layers' records of one process: the plan of the micro-batch that runs, the host arena, the figures."""

from __future__ import annotations

import weakref
from dataclasses import replace

from bytescale_ext.activation.buffers import RoundingBuffers
from bytescale_ext.activation.counts import Counts
from bytescale_ext.activation.link import Link
from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.plan.activation import ActivationPlan


class ActivationStore:
    """What the layers of a model share.

    Attributes:
        plan: of the micro-batch that runs forward next; set it before each.
        link: to the host arena.
        num_layers: of the whole model; layers count from 1.
        counts: what was moved and rebuilt.
        buffers: device memory that swapped layers come back to; None: new memory each time.
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
        """Whether a layer is run under the plan: it does something, and the layer is not one of the resident ones."""
        return not self.plan.is_off and layer_number <= self.num_layers - self.plan.resident_layers

    def before_resident(self, layer_number: int) -> LayerRecord | None:
        """A layer that is not under the plan is about to run forward; call it before.

        The first such layer runs while the last swapped one is written, and the second waits until it has been: so
        two layers are on the device whole, not three. Returns the record of the layer before, if that is under the
        plan: it is to be read back when this layer's backward pass begins.
        """
        behind = layer_number - self._latest[0] if self._latest is not None else 0
        if self._latest is not None and behind == 1:
            return self._latest[1]()
        if behind == 2:
            self.link.settle()
        self._latest = None  # a third layer, or another micro-batch
        return None

    def new_record(self, layer_number: int, num_rows: int, parameters: frozenset[int]) -> LayerRecord:
        """The record of a layer that is about to run forward."""
        previous = None
        if self.buffers is not None:
            self.buffers.release()
        if self._latest is not None and self._latest[0] == layer_number - 1:
            previous = self._latest[1]()
        record = LayerRecord(self.plan, num_rows, self.link, parameters, self.counts, previous, self.buffers)
        self._records.add(record)
        self._latest = layer_number, weakref.ref(record)
        return record

    def take_counts(self) -> Counts:
        """What was counted since the last call; counts anew."""
        counts = replace(self.counts)
        self.counts.__init__()  # type: ignore[misc]
        return counts

    def check_empty(self) -> None:
        """After the last backward pass of a step: nothing is remembered any more, no part of the arena is in use."""
        waiting = sum(record.is_waiting for record in self._records)
        assert not waiting and not self.link.used_bytes, f"{waiting=} {self.link.used_bytes=}"
        if self.buffers is not None:
            self.buffers.release()
