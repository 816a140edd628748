"""What one layer has to remember of one micro-batch, and how it comes back.

While a layer runs forward, every tensor that autograd saves is handed to its ``LayerRecord``, which gives a ``Slip``
in return; autograd keeps the slip. After the forward pass the record swaps, keeps and drops what its plan says. In
the backward pass the first slip that is asked for brings all of the layer back: swapped rows are read, dropped ones
rebuilt by running the token-wise parts of the layer again, for these rows only.

Tensors are known by name of the *station* where they pass (the modules that multiply matrices, and attention) or by
the order in which autograd saves them between stations, which is the same in every run of the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bytescale_ext.activation.buffers import RoundingBuffers
from bytescale_ext.activation.counts import Counts, split_rows
from bytescale_ext.activation.link import Link
from bytescale_ext.activation.region import (
    Region,
    Shape,
    elements_of,
    in_memory_order,
    memory_order,
    num_bytes,
    region_of,
)
from bytescale_ext.plan.activation import ActivationPlan


@dataclass
class Item:
    """The elements of one region: where they are now, and who still needs them.

    Attributes:
        kind: "input" (never recomputed), "token" (rebuilt by the order or station) or "product" (output of a station
            that is fed into the rebuilding).
        shape: how ``source`` looks onto them.
        source: the tensor, until the record is closed to new ones.
        rows: of the outermost dim in memory, (repeats, rows): the tokens of each tensor-parallel rank in turn.
        uses: slips that have not been redeemed.
        kept: rows on the device, [repeats, k, ...].
        written: rows in the arena, [repeats, w, ...].
        elements: all of it, [n], between its return and its last use.
    """

    kind: str
    shape: Shape
    source: torch.Tensor | None
    rows: tuple[int, int]
    uses: int = 0
    kept: torch.Tensor | None = None
    written: torch.Tensor | None = None
    elements: torch.Tensor | None = None
    num_elements: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def by_rows(self, elements: torch.Tensor) -> torch.Tensor:
        """Elements [n] of whole rows as [repeats, rows, row]."""
        return elements.view(self.rows[0], -1, self.num_elements // (self.rows[0] * self.rows[1]))


@dataclass
class Slip:
    """What autograd keeps in place of a tensor."""

    record: LayerRecord | None = None
    tensor: torch.Tensor | None = None
    item: Item | None = None
    shape: Shape | None = None

    def redeem(self) -> torch.Tensor:
        """The tensor; the first call for a layer brings all of it back. Each slip is redeemed once."""
        if self.item is None:
            assert self.tensor is not None, "this activation was given back already"
            return self.tensor
        record, self.record = self.record, None
        assert record is not None and self.shape is not None, "a layer with an activation policy has one backward pass"
        return record.redeem(self.item, self.shape)


class LayerRecord:
    """The memory of one layer and one micro-batch.

    Args:
        plan: what is swapped, kept and recomputed.
        num_rows: tokens of this rank (under sequence parallelism: its share of them).
        link: to the host arena.
        parameters: addresses of the storages of the layer's parameters, which are never copied.
        counts: where figures are added.
        previous: the record of the layer before, which is read back while this one runs backward; or None.
        buffers: device memory that swapped rows come back to; None: new memory each time.
    """

    def __init__(
        self,
        plan: ActivationPlan,
        num_rows: int,
        link: Link,
        parameters: frozenset[int],
        counts: Counts,
        previous: LayerRecord | None = None,
        buffers: RoundingBuffers | None = None,
    ) -> None:
        self.plan = plan
        self.split = split_rows(plan, num_rows)
        self.link = link
        self.parameters = parameters
        self.counts = counts
        self.buffers = buffers
        self.previous = weakref.ref(previous) if previous is not None else None
        self.rebuild: Callable[[LayerRecord], None] | None = None
        self.items: list[Item] = []
        self.stations: dict[str, Item] = {}  # tensors that pass a station, by name
        self.notes: dict[str, Any] = {}  # what a station returns beside tensors
        self.saved_between: list[Item | None] = []  # between stations, in their order; None: nothing to rebuild
        self._regions: dict[Region, Item] = {}
        self._held: list[torch.Tensor] = []  # so that no address is used twice while the layer runs
        self._blocks: list[Any] = []
        self._written: Any = None
        self._reading: Any = None
        self._restored = False
        self._rebuilt = 0
        self._release = weakref.finalize(self, _give_back_all, link, self._blocks)

    # While the layer runs forward.

    def item_of(self, tensor: torch.Tensor, kind: str) -> Item | None:
        """The item of a tensor: one that is there already, or a new one. None if it cannot be stored by rows."""
        region = region_of(tensor)
        if region is None:
            return None
        if region in self._regions:
            return self._regions[region]
        outermost = memory_order(tensor)[0] if tensor.dim() else -1
        rows = (1, tensor.shape[outermost]) if tensor.dim() else (1, 1)
        if kind != "input":
            if outermost != 0 or tensor.shape[0] % self.split.total:
                return None
            rows = (tensor.shape[0] // self.split.total, self.split.total)
        item = Item(kind, Shape.of(tensor), tensor.detach(), rows)
        item.num_elements, item.dtype, item.device = tensor.numel(), tensor.dtype, tensor.device
        self._regions[region] = item
        self.items.append(item)
        return item

    def pass_station(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Note a tensor that goes into or comes out of a station."""
        item = self.item_of(tensor, kind)
        by_rows = bool(tensor.dim()) and memory_order(tensor)[0] == 0 and not tensor.shape[0] % self.split.total
        assert item is not None and by_rows, f"{name}: {tensor.shape=} {tensor.stride()=} {self.split.total=}"
        self.stations[name] = item

    def save_between(self, tensor: torch.Tensor) -> Slip:
        """A slip for a tensor that is saved between stations."""
        if self._is_parameter(tensor):
            self.saved_between.append(None)
            return Slip(tensor=tensor.detach())
        known = self.find(tensor)
        item = known or self.item_of(tensor, "token")
        self.saved_between.append(item if known is None else None)
        return self._slip(tensor, item)

    def save_inside(self, tensor: torch.Tensor, kind: str = "") -> Slip:
        """A slip for a tensor that is saved inside a station: an item that is known, else of ``kind``, else left."""
        if self._is_parameter(tensor):
            return Slip(tensor=tensor.detach())
        item = self.find(tensor)
        if item is None and kind:
            item = self.item_of(tensor, kind)
        return self._slip(tensor, item)

    def find(self, tensor: torch.Tensor) -> Item | None:
        """The item that a tensor is a view of, if there is one."""
        region = region_of(tensor)
        return self._regions.get(region) if region is not None else None

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.parameters

    def _slip(self, tensor: torch.Tensor, item: Item | None) -> Slip:
        if item is None:
            self._held.append(tensor.detach())
            self.counts.kept_bytes += num_bytes(tensor)
            return Slip(tensor=tensor.detach())
        item.uses += 1
        return Slip(self, item=item, shape=Shape.of(tensor))

    @property
    def is_waiting(self) -> bool:
        """Whether a tensor of it is still to be asked for."""
        return any(item.uses for item in self.items)

    @property
    def rebuilds(self) -> bool:
        """Whether anything has to be computed again."""
        return self.plan.rebuild_cheap or self.split.kept < self.split.total

    @property
    def first_row(self) -> int:
        """The first row that is computed again between stations."""
        return 0 if self.plan.rebuild_cheap else self.split.kept

    def close(self) -> None:
        """The layer has run: swap, keep and drop. Copies to the host begin."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        sources: list[torch.Tensor] = []
        needed = {"input"} | ({"product"} if self.rebuilds else set())
        for item in self.items:
            source, item.source = item.source, None
            assert source is not None
            if item.uses or (item.kind in needed and self.rebuilds):
                written = len(pairs)
                self._store(item, in_memory_order(source), pairs)
                sources += [source] * (len(pairs) - written)
        self._regions.clear()
        self._held.clear()
        if pairs:
            self._written = self.link.write(pairs, sources)
            self._set_tickets(self._written)

    def _set_tickets(self, ticket: Any) -> None:
        """The parts of the arena are free after these copies."""
        for entry in self._blocks:
            entry[1] = ticket

    def _store(self, item: Item, source: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Split the rows of one item; ``source`` has its dims in memory order."""
        repeats, rows = item.rows
        if item.kind == "input":
            swapped, kept = round(self.plan.input_swap * rows), rows
        elif item.kind == "token" and self.plan.rebuild_cheap:
            swapped = kept = 0
        else:
            swapped, kept = self.split.swapped, self.split.kept
        self.counts.recomputed_bytes += num_bytes(source) * (rows - kept) // rows if item.uses else 0
        if not kept:
            return
        by_rows = source.unflatten(0, (repeats, rows)) if source.dim() else source.view(1, 1)
        block = None
        if swapped:
            part = by_rows[:, :swapped]
            block = self.link.take(num_bytes(part))
            if block is None:
                self.counts.overflowed_bytes += num_bytes(part)
                swapped = 0  # the arena is full: these rows stay
            else:
                item.written = self.link.arena.view(block, tuple(part.shape), item.dtype)
                pairs.append((item.written, part))
                self._blocks.append([block, None])
                self.counts.swapped_bytes += num_bytes(part)
        if kept > swapped:
            part = by_rows[:, swapped:kept]
            item.kept = part if not swapped and kept == rows else part.clone()
            self.counts.kept_bytes += num_bytes(part)

    # In the backward pass.

    def redeem(self, item: Item, shape: Shape) -> torch.Tensor:
        """A view of an item, all of which is brought back first; its memory is free after its last use."""
        if not self._restored:
            self.restore()
        assert item.elements is not None, f"{item.kind=} {shape=}"
        tensor = shape.view_as_saved(item.elements)
        item.uses -= 1
        if not item.uses:
            item.elements = None
        return tensor

    def prefetch(self) -> None:
        """Begin to read the swapped rows; nothing happens the second time."""
        if self._reading is not None or self._restored:
            return
        pairs = []
        for item, elements in self._memory_of_swapped():
            item.elements = elements
            assert item.written is not None
            rows = item.by_rows(elements)[:, : item.written.shape[1]]
            pairs.append((rows, item.written.reshape(rows.shape)))
        self._reading = (self.link.read(pairs, self._written),)
        self._set_tickets(self._reading[0])

    def _memory_of_swapped(self) -> list[tuple[Item, torch.Tensor]]:
        """Memory [n] for each item of which rows are in the arena: in a rounding buffer if there is one, or new."""
        swapped = [item for item in self.items if item.written is not None]
        sizes = [item.num_elements * item.dtype.itemsize for item in swapped]
        self.counts.restored_bytes = max(self.counts.restored_bytes, RoundingBuffers.bytes_of(sizes))
        parts = self.buffers.take(self, sizes) if self.buffers is not None else None
        if parts is not None:
            return [(item, part.view(item.dtype)) for item, part in zip(swapped, parts, strict=True)]
        return [(item, torch.empty(item.num_elements, dtype=item.dtype, device=item.device)) for item in swapped]

    def restore(self) -> None:
        """Bring everything back, and let the layer before begin to."""
        self.link.settle()
        self.prefetch()
        self._restored = True
        self.link.wait(self._reading[0])
        self._release()
        for item in self.items:
            self._add_kept(item)
        previous = self.previous() if self.previous is not None else None
        if previous is not None:
            previous.prefetch()
        if self.rebuilds and self.is_waiting:
            assert self.rebuild is not None
            self._rebuilt = 0
            self.rebuild(self)
        for item in self.items:
            if not item.uses:
                item.elements = None
        self.rebuild = None

    def _add_kept(self, item: Item) -> None:
        """Put the rows that stayed beside those that were read."""
        kept, item.kept, written, item.written = item.kept, None, item.written, None
        if kept is None:
            return
        if kept.shape[1] == item.rows[1]:
            item.elements = kept.reshape(-1)
            return
        if item.elements is None:
            item.elements = torch.empty(item.num_elements, dtype=item.dtype, device=item.device)
        first = written.shape[1] if written is not None else 0
        rows = item.by_rows(item.elements)
        rows[:, first : first + kept.shape[1]] = kept.reshape(rows.shape[0], kept.shape[1], -1)

    # While the layer is rebuilt, from ``first_row`` on.

    def rows_from(self, item: Item, first_row: int) -> torch.Tensor:
        """The rows of an item from ``first_row`` on, end to end, with the dims of its tensor in memory order."""
        assert item.elements is not None
        rows = item.elements.view(-1, self.split.total, item.num_elements // item.shape.sizes[0])
        return rows[:, first_row:].reshape(-1, *item.shape.sizes[1:])

    def rebuild_between(self, tensor: torch.Tensor) -> None:
        """A tensor that is saved between stations while the layer runs again: the next one in order."""
        item = self.saved_between[self._rebuilt]
        self._rebuilt += 1
        if item is not None:
            self.rebuild_item(item, tensor)

    def rebuild_station(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor at a station while the layer runs again."""
        item = self.stations[name]
        if item.kind == "token":
            self.rebuild_item(item, tensor)

    def rebuild_item(self, item: Item, tensor: torch.Tensor) -> None:
        """Take the rows from ``first_row`` on out of ``tensor``."""
        if not item.uses:
            return
        first = self.first_row
        elements = elements_of(tensor.detach())
        if first == 0:
            item.elements = elements
            return
        if item.elements is None:
            item.elements = torch.empty(item.num_elements, dtype=item.dtype, device=item.device)
        rows = item.by_rows(item.elements)
        rows[:, first:] = elements.view(rows.shape[0], -1, rows.shape[2])

    def product(self, name: str, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The output of a station while the layer runs again: known rows as they are, others by ``compute(first)``."""
        item = self.stations[name]
        if self.split.kept < self.split.total:
            rest = elements_of(compute(self.split.kept))
            if item.elements is None:
                item.elements = torch.empty(item.num_elements, dtype=item.dtype, device=item.device)
            rows = item.by_rows(item.elements)
            rows[:, self.split.kept :] = rest.view(rows.shape[0], -1, rows.shape[2])
        assert item.elements is not None
        return item.shape.view(item.elements)


def _give_back_all(link: Link, blocks: list[Any]) -> None:
    """Free the parts of the arena that a record holds, after its last copies."""
    for block, ticket in blocks:
        link.give_back(block, ticket)
    blocks.clear()
