"""The saved tensors of one layer and one micro-batch, between its forward and its backward pass.

During the forward pass autograd hands every tensor that it saves to the ``LayerRecord`` and keeps a ``SavedTensor`` in
its place. After the forward pass the record swaps, keeps and drops rows by the plan. In the backward pass the first
``SavedTensor.restore`` restores the whole layer: swapped rows are read back, and dropped rows are recomputed by running
the token-wise parts of the layer again for these rows only.

A *hook point* is a module that multiplies by a weight matrix, or attention. A tensor is identified by the hook point
that it enters or leaves. Between hook points it is identified by its number, because every run of the layer saves
tensors in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from bytescale_ext.activation.arena import ArenaPart
from bytescale_ext.activation.buffers import RoundingBuffers
from bytescale_ext.activation.counts import Counts, split_rows
from bytescale_ext.activation.link import HeldParts, Link, Pairs, Ticket
from bytescale_ext.activation.region import (
    Region,
    StoredRegion,
    TensorView,
    elements_of,
    in_memory_order,
    is_sample_major,
    num_bytes,
)
from bytescale_ext.plan.activation.plan import ActivationPlan


@dataclass(slots=True)
class SavedTensor:
    """The object that autograd keeps in place of a tensor: the tensor itself, or a view of a stored region."""

    tensor: torch.Tensor | None = None
    record: LayerRecord | None = None
    region: StoredRegion | None = None
    view: TensorView | None = None

    def restore(self) -> torch.Tensor:
        """Return the tensor, of any shape. The first call restores the whole layer. A tensor is restored once."""
        if self.region is None:
            assert self.tensor is not None, "this activation was restored before"
            return self.tensor
        record, self.record = self.record, None
        assert record is not None and self.view is not None, "a layer with an activation policy has one backward pass"
        return record.tensor_of(self.region, self.view)

    def become(self, other: SavedTensor) -> None:
        """Take the place of another object."""
        self.tensor, self.record, self.region, self.view = other.tensor, other.record, other.region, other.view


@lru_cache(maxsize=4096)
def _rows_of_view(view: TensorView, total: int) -> tuple[int, int] | None:
    """Return (repeats, rows) of a tensor [rows, ...] with ``total`` rows on a rank; None if they are not outermost."""
    if not view.sizes or view.sizes[0] % total:
        return None
    repeats = view.sizes[0] // total
    if view.is_sample_major and view.strides[1] == view.sizes[0] * view.strides[0]:
        return repeats * view.sizes[1], total
    return (repeats, total) if view.order[0] == 0 else None


class LayerRecord:
    """The saved tensors of one layer and one micro-batch.

    Args:
        plan: shares of rows to swap, keep and recompute.
        num_rows: tokens of this rank; with sequence parallelism, its share of them.
        link: link to the host arena.
        parameters: addresses of the storages of the layer's parameters, which are never copied.
        counts: counts that this record updates.
        buffers: device memory that swapped rows are read back into; None allocates new memory each time.

    Attributes:
        read_next: function that starts reading the layer of the next backward pass; set by the store.
        rebuild: function that runs the layer again for the rows from ``first_row`` on; set by the layer.
        regions: stored regions, in the order of their first appearance.
        hook_points: regions of the tensors that enter or leave a hook point, by name.
        biases: bias that a hook point returned with its output, by name.
        saved_between: regions saved between hook points, in order; None for tensors that need no recomputation.
    """

    def __init__(
        self,
        plan: ActivationPlan,
        num_rows: int,
        link: Link,
        parameters: frozenset[int],
        counts: Counts,
        buffers: RoundingBuffers | None = None,
    ) -> None:
        self.plan = plan
        self.split = split_rows(plan, num_rows)
        self.link = link
        self.parameters = parameters
        self.counts = counts
        self.buffers = buffers
        self.read_next: Callable[[], None] | None = None
        self.rebuild: Callable[[LayerRecord], None] | None = None
        self.regions: list[StoredRegion] = []
        self.hook_points: dict[str, StoredRegion] = {}
        self.biases: dict[str, torch.Tensor | None] = {}
        self.saved_between: list[StoredRegion | None] = []
        self._by_key: dict[Region, StoredRegion] = {}
        self._alive: list[torch.Tensor] = []  # references, so that no address is reused while the layer runs
        self._held_parts = HeldParts()
        self._written: Ticket = None
        self._reading: tuple[Ticket] | None = None  # a ticket may be None
        self._restored = False
        self._rebuilt = 0
        self._release = weakref.finalize(self, self._held_parts.give_back, link)

    # In the forward pass.

    def _look_up(self, tensor: torch.Tensor) -> tuple[TensorView, Region | None, StoredRegion | None]:
        """Return the view and the key of a tensor of any shape, and its region if it has one already."""
        view = TensorView.of(tensor)
        key = view.region_of(tensor)
        return view, key, self._by_key.get(key) if key is not None else None

    def _new_region(self, tensor: torch.Tensor, view: TensorView, key: Region | None, kind: str) -> StoredRegion | None:
        """Return a new region of a tensor of any shape; None if it has no key or cannot be split by rows."""
        if key is None:
            return None
        rows = _rows_of_view(view, self.split.total)
        if rows is None and kind != "input":
            return None
        if rows is None or (kind == "input" and not is_sample_major(tensor)):
            rows = (1, view.sizes[view.order[0]]) if view.sizes else (1, 1)
        region = StoredRegion(kind, view, tensor, rows)
        self._by_key[key] = region
        self.regions.append(region)
        return region

    def pass_hook_point(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Register a tensor [rows, ...] that enters or leaves a hook point."""
        view, key, region = self._look_up(tensor)
        region = region or self._new_region(tensor, view, key, kind)
        by_rows = _rows_of_view(view, self.split.total)
        assert region and by_rows, f"{name}: {tensor.shape=} {tensor.stride()=} {self.split.total=}"
        self.hook_points[name] = region

    def save_between(self, tensor: torch.Tensor) -> SavedTensor:
        """Save a tensor of any shape between hook points."""
        view, key, region = self._look_up(tensor)
        new = None
        if region is None:
            if self._is_parameter(tensor):
                self.saved_between.append(None)
                return SavedTensor(tensor)
            region = new = self._new_region(tensor, view, key, "token")
        self.saved_between.append(new)
        return self._saved(tensor, view, region)

    def save_inside(self, tensor: torch.Tensor, kind: str = "") -> SavedTensor:
        """Save a tensor of any shape inside a hook point. Unknown tensors without a ``kind`` stay on the device."""
        view, key, region = self._look_up(tensor)
        if region is None:
            if self._is_parameter(tensor):
                return SavedTensor(tensor)
            region = self._new_region(tensor, view, key, kind) if kind else None
        return self._saved(tensor, view, region)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.parameters

    def _saved(self, tensor: torch.Tensor, view: TensorView, region: StoredRegion | None) -> SavedTensor:
        if region is None:
            self._alive.append(tensor.detach())
            self.counts.kept_bytes += num_bytes(tensor)
            return SavedTensor(self._alive[-1])
        region.uses += 1
        return SavedTensor(None, self, region, view)

    @property
    def is_waiting(self) -> bool:
        """Whether autograd has yet to ask for some of the tensors."""
        return any(region.uses for region in self.regions)

    @property
    def rebuilds(self) -> bool:
        """Whether the backward pass recomputes anything."""
        return self.plan.rebuild_cheap or self.split.kept < self.split.total

    @property
    def first_row(self) -> int:
        """The first row that is recomputed between hook points."""
        return 0 if self.plan.rebuild_cheap else self.split.kept

    def abandon(self) -> None:
        """Drop all tensors, because the forward pass failed: autograd does not collect the cycle that they close."""
        self.regions.clear()
        self.hook_points.clear()
        self._by_key.clear()

    @torch.no_grad()
    def close(self) -> None:
        """End the forward pass: swap, keep and drop rows, and start the copies to the host."""
        rebuilds, counts = self.rebuilds, self.counts
        stored: list[tuple[StoredRegion, torch.Tensor, int, int]] = []
        for region in self.regions:
            source, region.source = region.source, None
            assert source is not None
            if region.uses or (rebuilds and region.kind != "token"):
                stored.append((region, source, *self._split_of(region)))
        pairs: Pairs = []
        sources: list[torch.Tensor] = []
        parts = self._take_parts([region.num_bytes * swapped // region.rows[1] for region, _, swapped, _ in stored])
        for (region, source, swapped, kept), part in zip(stored, parts, strict=True):
            if part is not None:
                whole = swapped == region.rows[1] and region.view.is_plain
                rows = source if whole else self._first_rows(region, source, swapped)
                region.written = self.link.arena.view(part, rows.shape, region.dtype)
                pairs.append((region.written, rows))
                sources.append(source)
                region.written_rows = swapped
                counts.swapped_bytes += region.num_bytes * swapped // region.rows[1]
            elif swapped:  # the arena is full, so these rows stay on the device
                counts.overflowed_bytes += region.num_bytes * swapped // region.rows[1]
                swapped = 0
            if kept > swapped:
                region.kept = self._kept_rows(region, source.detach(), swapped, kept)
                counts.kept_bytes += num_bytes(region.kept)
        self._by_key.clear()
        self._alive.clear()
        if pairs:
            self._written = self.link.write(pairs, sources)
            self._held_parts.last_copy = self._written

    def _split_of(self, region: StoredRegion) -> tuple[int, int]:
        """Return the rows of a region that are swapped, and the rows that are swapped or kept; count the others."""
        rows = region.rows[1]
        if region.kind == "input":
            swapped, kept = round(self.plan.input_swap * rows), rows
        elif region.kind == "token" and self.plan.rebuild_cheap:
            swapped = kept = 0
        else:
            swapped, kept = self.split.swapped, self.split.kept
        self.counts.recomputed_bytes += region.num_bytes * (rows - kept) // rows if region.uses else 0
        return swapped, kept

    def _take_parts(self, sizes: Sequence[int]) -> list[ArenaPart | None]:
        """Take a part of the arena for each size in bytes, all in one block if possible; None if there is no room."""
        total = RoundingBuffers.bytes_of(sizes)
        block = self.link.take(total) if total else None
        if block is None:
            parts = [self.link.take(size) if size else None for size in sizes]
            self._held_parts.parts += [part for part in parts if part is not None]
            return parts
        self._held_parts.parts.append(block)
        starts = accumulate((RoundingBuffers.bytes_of([size]) for size in sizes), initial=block.start)
        return [ArenaPart(start, size) if size else None for start, size in zip(starts, sizes, strict=False)]

    @staticmethod
    def _first_rows(region: StoredRegion, source: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first ``count`` rows of ``source``, of any shape, as a view [repeats, count, ...]."""
        if source.is_contiguous():
            return region.some_rows(source, 0, count)
        source = in_memory_order(source)
        whole = source.shape[0] == region.rows[0] * region.rows[1]
        rows: torch.Tensor = (source if whole else source.flatten(0, 1)).unflatten(0, region.rows)
        return rows[:, :count]

    def _kept_rows(self, region: StoredRegion, source: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Return rows of ``source``, of any shape: all of it in any shape, or a copy [repeats, end - first, ...]."""
        is_whole = end - first == region.rows[1]
        if is_whole and region.view.is_plain:
            return source
        rows = self._first_rows(region, source, end)
        return rows if is_whole else rows[:, first:].clone()

    # In the backward pass.

    def tensor_of(self, region: StoredRegion, view: TensorView) -> torch.Tensor:
        """Return a tensor of any shape, after restoring the layer. Its region is freed after the last use."""
        if not self._restored:
            self.restore()
        assert region.elements is not None, f"{region.kind=} {view=}"
        tensor = view.apply_as_saved(region.elements)
        region.uses -= 1
        if not region.uses:
            region.elements = None
        return tensor

    def prefetch(self) -> None:
        """Start reading the swapped rows back. A second call does nothing."""
        if self._reading is not None or self._restored:
            return
        pairs = []
        for region, elements in self._swapped_memory():
            region.elements, written = elements, region.written
            assert written is not None
            if written.shape == elements.shape:
                pairs.append((elements, written))
                continue
            rows = region.some_rows(elements, 0, region.written_rows)
            pairs.append((rows, written if written.dim() == 3 else written.view(rows.shape)))
        self._reading = (self.link.read(pairs, self._written),)
        self._held_parts.last_copy = self._reading[0]

    def _swapped_memory(self) -> list[tuple[StoredRegion, torch.Tensor]]:
        """Return each region with swapped rows and device memory for it, in a rounding buffer if one is free."""
        swapped = [region for region in self.regions if region.written is not None]
        sizes = [region.num_bytes for region in swapped]
        self.counts.restored_bytes = max(self.counts.restored_bytes, RoundingBuffers.bytes_of(sizes))
        parts = self.buffers.take(self, sizes) if self.buffers is not None else None
        if parts is not None:
            pairs = zip(swapped, parts, strict=True)
            return [(region, part.view(region.dtype).view(region.shape)) for region, part in pairs]
        return [(region, region.allocate()) for region in swapped]

    def restore(self) -> None:
        """Restore all regions, and start reading the layer of the next backward pass."""
        self.link.settle()
        if self._held_parts.parts:
            self.counts.reads += 1
            self.counts.late_reads += self._reading is None
        self.prefetch()
        self._restored = True
        assert self._reading is not None
        self.link.wait(self._reading[0])
        self._release()
        for region in self.regions:
            region.rejoin_kept()
        if self.read_next is not None:
            self.read_next()
        if self.rebuilds and self.is_waiting:
            assert self.rebuild is not None
            self._rebuilt = 0
            self.rebuild(self)
        for region in self.regions:
            if not region.uses:
                region.elements = None
        self.rebuild = None

    # While the layer runs again, from ``first_row`` on.

    def rows_from(self, name: str, first_row: int) -> torch.Tensor:
        """Return a hook point's tensor [repeats * rows, ...] from ``first_row`` on, in its own order."""
        region = self.hook_points[name]
        assert region.elements is not None, f"{name=}"
        sizes, total = region.view.sizes, self.split.total
        if region.view.is_sample_major:
            samples = region.elements.view(sizes[1], -1, total, region.view.num_elements // (sizes[0] * sizes[1]))
            return samples[:, :, first_row:].reshape(sizes[1], -1, *sizes[2:]).transpose(0, 1)
        rows = region.elements.view(-1, total, region.view.num_elements // sizes[0])
        return rows[:, first_row:].reshape(-1, *sizes[1:])

    def rebuild_between(self, tensor: torch.Tensor) -> None:
        """Store the next recomputed tensor [rows, ...] between hook points."""
        region = self.saved_between[self._rebuilt]
        self._rebuilt += 1
        if region is not None:
            self._rebuild_region(region, tensor)

    def rebuild_hook_point(self, name: str, tensor: torch.Tensor) -> None:
        """Store the recomputed tensor [rows, ...] of a hook point."""
        region = self.hook_points[name]
        if region.kind == "token":
            self._rebuild_region(region, tensor)

    def _rebuild_region(self, region: StoredRegion, tensor: torch.Tensor) -> None:
        """Store the rows from ``first_row`` on."""
        if not region.uses:
            return
        if self.first_row:
            region.put_rows(self.first_row, in_memory_order(tensor.detach()))
        elif region.view.is_plain and tensor.shape == region.shape and tensor.is_contiguous():
            region.elements = tensor.detach()
        else:
            region.elements = elements_of(tensor.detach())

    def product(self, name: str, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the output [rows, ...] of a hook point. ``compute(first)`` returns the rows from ``first`` on."""
        region = self.hook_points[name]
        if self.split.kept < self.split.total:
            region.put_rows(self.split.kept, in_memory_order(compute(self.split.kept)))
        assert region.elements is not None, f"{name=}"
        return region.view.apply(region.elements)
