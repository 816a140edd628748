"""The state that the layers of a process share: the plan of the current micro-batch, the host arena, the counts."""

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
        plan: of the next micro-batch; set it before each forward pass.
        link: to the host arena.
        num_layers: of the process where no layers were added; they count from 1.
        counts: of bytes moved and rebuilt.
        buffers: device memory into which swapped layers are read back; None: new memory each time.
        order: of the running step in a pipeline or in slices; None: each forward pass is followed by its backward pass.
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
        """Tell that this process has a layer of this number in the model, from 1 on."""
        self._numbers = sorted({*self._numbers, layer_number})

    def begin_step(self, actions: Sequence[Action]) -> None:
        """Follow this order of work in the coming step."""
        self.order = WorkOrder(actions)
        self._tops.clear()

    def begin_forward(self) -> None:
        """Go on to the next forward pass of the step's order, and start reading what runs backward after it."""
        if self.order is not None:
            self.order.begin_forward()
            self._latest = None
            self._read_top(self.order.after_forward())

    def is_planned(self, layer_number: int) -> bool:
        """Return whether the plan changes anything for a layer: it is not off, and the layer is not resident."""
        if self.plan.is_off:
            return False
        numbers = self._numbers or list(range(1, self.num_layers + 1))
        if layer_number in numbers[len(numbers) - self.plan.resident_layers :]:
            return False
        return not (layer_number + 1 not in numbers and self._turns_around)

    @property
    def _turns_around(self) -> bool:
        """Whether the last layer of the running chunk would be read back as soon as it is written."""
        swaps = self.plan.swap or self.plan.input_swap
        is_policy = self.plan.policy != "shares"  # given shares apply to all layers
        return bool(swaps) and is_policy and self.order is not None and self.order.turns_around

    def before_resident(self, layer_number: int) -> Callable[[], None] | None:
        """Prepare for a layer that is not under the plan; call it before the layer runs forward.

        The first such layer runs while the last swapped layer is written. The second waits for that write, so only two
        whole layers are on the device, not three. Returns what to call when this layer's backward pass starts: it
        starts reading the layer that runs backward next; None where there is nothing to read.
        """
        behind = layer_number - self._latest[0] if self._latest is not None else 0
        if self._latest is not None and behind == 1:
            return partial(_read, self._latest[1])
        if behind == 2:
            self.link.settle()
        self._latest = None  # a third layer, or another micro-batch
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
        """Start reading the last layer of the unit that runs backward after ``unit``."""
        if self.order is not None:
            self._read_top(self.order.after_backward(unit))

    def _read_top(self, unit: Action | None) -> None:
        """Start reading the last layer of a unit that has run forward; a resident layer above it would do so itself."""
        number, record = self._tops.get(unit, (0, None)) if unit is not None else (0, None)
        if record is not None and number + 1 not in self._numbers:
            _read(record)

    def take_counts(self) -> Counts:
        """Return the counts since the last call, and reset them."""
        return self.counts.take()

    def check_empty(self) -> None:
        """Assert, after the last backward pass of a step, that no tensor is saved and the arena is empty.

        The next step has an order of its own.
        """
        self.order = None
        waiting = sum(record.is_waiting for record in self._records)
        assert not waiting and not self.link.used_bytes, f"{waiting=} {self.link.used_bytes=}"
        if self.buffers is not None:
            self.buffers.release()


def _read(record: weakref.ref[LayerRecord]) -> None:
    """Start reading a layer back, unless its record is gone."""
    alive = record()
    if alive is not None:
        alive.prefetch()
