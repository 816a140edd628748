"""The state that the layers of a process share: the plan of the current micro-batch, the host arena and counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from bytescale_ext.activation.buffers import RoundingBuffers
from bytescale_ext.activation.counts import Counts
from bytescale_ext.activation.link import Link
from bytescale_ext.activation.order import WorkOrder
from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.schedule.actions import Action


class ActivationStore:
    """The shared state of a model's layers.

    Attributes:
        plan: activation plan of the next micro-batch, set before each forward pass.
        link: link to the host arena.
        num_layers: number of layers of the process, numbered from 1; ignored once ``add_layer`` has been called.
        counts: counts of the bytes moved and recomputed.
        buffers: device memory that swapped layers are read back into; None allocates new memory each time.
        order: order of work of the running step; None if each forward pass is followed by its backward pass.
    """

    def __init__(self, plan: ActivationPlan, link: Link, num_layers: int) -> None:
        self.plan = plan
        self.link = link
        self.num_layers = num_layers
        self.counts = Counts()
        self.buffers: RoundingBuffers | None = None
        self.order: WorkOrder | None = None
        self._numbers: list[int] = []
        self._tops: dict[Action, tuple[int, weakref.ref[LayerRecord]]] = {}
        self._records: weakref.WeakSet[LayerRecord] = weakref.WeakSet()
        self._latest: tuple[int, weakref.ref[LayerRecord]] | None = None

    def add_layer(self, layer_number: int) -> None:
        """Register a layer of this process by its number in the model, from 1 on."""
        self._numbers = sorted({*self._numbers, layer_number})

    def begin_step(self, actions: Sequence[Action]) -> None:
        """Set the order of work of the coming step."""
        self.order = WorkOrder(actions)
        self._tops.clear()

    def begin_forward(self) -> None:
        """Advance to the next forward pass of the step's order, and start reading for the backward pass after it."""
        if self.order is not None:
            self.order.begin_forward()
            self._latest = None
            self._read_top(self.order.after_forward())

    def is_planned(self, layer_number: int) -> bool:
        """Return whether the plan applies to a layer: the plan is not off and the layer is not resident."""
        if self.plan.is_off:
            return False
        numbers = self._numbers or list(range(1, self.num_layers + 1))
        if layer_number in numbers[len(numbers) - self.plan.resident_layers :]:
            return False
        return not (layer_number + 1 not in numbers and self._turns_around)

    @property
    def _turns_around(self) -> bool:
        """Whether the last layer of the running chunk would be read back immediately after it is written."""
        swaps = self.plan.swap or self.plan.input_swap
        is_policy = self.plan.policy != "shares"  # shares from the command line apply to all layers
        return bool(swaps) and is_policy and self.order is not None and self.order.turns_around

    def before_resident(self, layer_number: int) -> Callable[[], None] | None:
        """Prepare for the forward pass of a layer that is not under the plan.

        The first such layer runs while the last swapped layer is written. The second one waits for that write, so that
        two whole layers are on the device, not three.

        Returns:
            A function to call at the start of this layer's backward pass, which starts reading the layer of the next
            backward pass; None if there is nothing to read.
        """
        behind = layer_number - self._latest[0] if self._latest is not None else 0
        if self._latest is not None and behind == 1:
            return partial(_read, self._latest[1])
        if behind == 2:
            self.link.settle()
        self._latest = None  # for a third layer, or another micro-batch
        unit = self.order.running if self.order is not None else None
        is_first = layer_number - 1 not in self._numbers
        return partial(self._read_after, unit) if unit is not None and is_first else None

    def new_record(self, layer_number: int, num_rows: int, parameters: frozenset[int]) -> LayerRecord:
        """Make the record of a layer that is about to run forward."""
        if self.buffers is not None:
            self.buffers.release()
        record = LayerRecord(self.plan, num_rows, self.link, parameters, self.counts, self.buffers)
        unit = self.order.running if self.order is not None else None
        if self._latest is not None and self._latest[0] == layer_number - 1:
            record.read_next = partial(_read, self._latest[1])
        elif unit is not None:
            record.read_next = partial(self._read_after, unit)
        if unit is not None:
            self._tops[unit] = layer_number, weakref.ref(record)
        self._records.add(record)
        self._latest = layer_number, weakref.ref(record)
        return record

    def _read_after(self, unit: Action) -> None:
        """Start reading the last layer of the unit whose backward pass follows the backward pass of ``unit``."""
        if self.order is not None:
            self._read_top(self.order.after_backward(unit))

    def _read_top(self, unit: Action | None) -> None:
        """Start reading the last layer of a unit, unless a resident layer above it will start that read."""
        number, record = self._tops.get(unit, (0, None)) if unit is not None else (0, None)
        if record is not None and number + 1 not in self._numbers:
            _read(record)

    def take_counts(self) -> Counts:
        """Return the counts since the last call, and reset them."""
        return self.counts.take()

    def check_empty(self) -> None:
        """Assert that no tensor is saved and the arena is empty, after the last backward pass of a step.

        Also drops the order of the step.
        """
        self.order = None
        waiting = sum(record.is_waiting for record in self._records)
        assert not waiting and not self.link.used_bytes, f"{waiting=} {self.link.used_bytes=}"
        if self.buffers is not None:
            self.buffers.release()


def _read(record: weakref.ref[LayerRecord]) -> None:
    """Start reading a layer back, unless its record no longer exists."""
    alive = record()
    if alive is not None:
        alive.prefetch()
