"""What the stages of a pipeline hold while they run a plan: activations, kept keys, and sums of key gradients.

A slice's activations and keys live from its forward to its backward pass. With slices, the backward pass of a
micro-batch's last slice adds to the gradient sums of all earlier slices, and each slice's sum ends with its own
backward pass (``attention/slices.py``). The order of work alone decides what is held, so no times are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.activation.load import HeldSlices
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.memory.stage_memory import LayerBytes, StageMemory
from bytescale_ext.plan.schedule.actions import BACKWARD, FORWARD, SliceSchedule, work_orders
from bytescale_ext.plan.schedule.deferred import WEIGHTS
from bytescale_ext.plan.step.sizes import Slicing

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Held:
    """The most that each stage of each rank (pipeline) holds at once, of a plan: [p, num_ranks] each.

    Attributes:
        tokens: tokens of the rank whose activations are held; with virtual stages, in all their layers.
        kept_keys: tokens of other ranks whose keys are held from slice to slice.
        layer_bytes: of both and of the sums of key gradients, in one layer.
        parts: what these bytes are when they are most: activations, keys of other ranks, sums: [3, p, num_ranks].
    """

    tokens: Floats
    kept_keys: Floats
    layer_bytes: Floats
    parts: Floats

    def device_bytes(self, memory: StageMemory) -> float:
        """Return the bytes of the device that takes most, on stages of this memory."""
        return memory.most_bytes(self.layer_bytes.max(axis=1).tolist())

    def device_parts(self, memory: StageMemory) -> DeviceParts:
        """Return what the bytes of the device that takes most are."""
        ranks = self.layer_bytes.argmax(axis=1)
        parts = self.parts * np.array(memory.num_layers)[:, None]
        of_stages = [
            DeviceParts(*parts[:, stage, rank].tolist(), *ends)
            for stage, (rank, *ends) in enumerate(
                zip(ranks.tolist(), memory.state_bytes, memory.working_bytes, strict=True)
            )
        ]
        return max(of_stages, key=lambda parts: parts.total)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Bytes of a device at its peak.

    Attributes:
        activations: with each slice's own keys.
        keys: kept, of other ranks.
        sums: of key gradients.
        states: parameters, gradients, optimizer states.
        working: gradients of a layer, or logits.
    """

    activations: float
    keys: float
    sums: float
    states: float
    working: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.activations + self.keys + self.sums + self.states + self.working


@dataclass(frozen=True, eq=False)
class _Slices:
    """Tokens of each slice, micro-batch by micro-batch: [slices] each.

    Attributes:
        own: of the rank.
        kept: of others, whose keys are kept.
        kept_sums: of others, the sums of whose gradients are kept too.
    """

    own: Floats
    kept: Floats
    kept_sums: Floats

    @classmethod
    def of(cls, table: ShardTable, cost: CostModel, slicing: Slicing) -> _Slices:
        lengths, widths = table.lengths.astype(np.float64), table.widths.astype(np.float64)
        cut = SliceShares.of(cost, lengths, widths, slicing)
        cells = (table.rows[:, None] * slicing.num_slices + np.arange(slicing.num_slices)).ravel()
        of_others = np.where(cut.kept & (widths > 1), lengths - table.tokens, 0.0)
        own, kept, kept_sums = (
            np.bincount(
                cells, weights=(whole[:, None] * cut.tokens).ravel(), minlength=table.num_rows * slicing.num_slices
            )
            for whole in (table.tokens, of_others, np.where(cut.summed, of_others, 0.0))
        )
        return cls(own, kept, kept_sums)

    def summed(self, num_slices: int) -> Floats:
        """Return by how many tokens the backward pass of each slice changes the tokens that have sums: [slices]."""
        tokens = (self.own + self.kept_sums).reshape(-1, num_slices)
        changes = -tokens
        changes[:, -1] = tokens[:, :-1].sum(axis=1)
        return changes.ravel()


def held(
    table: ShardTable,
    slicing: Slicing,
    cost: CostModel,
    memory: StageMemory,
    num_chunks: int = 1,
    stages: Sequence[int] | None = None,
) -> Held:
    """Return the most that each stage holds.

    Args:
        table: the plan; ranks are pipelines.
        slicing: how micro-batches are cut.
        cost: in which slices are equal.
        memory: of the pipeline's stages.
        num_chunks: virtual stages of each.
        stages: the stages of interest, others are left at 0; None: all.
    """
    slices, num_stages, layer = _Slices.of(table, cost, slicing), len(memory.num_layers), memory.layer
    summed = slices.summed(slicing.num_slices)
    found, parts = np.zeros((3, num_stages, table.num_ranks)), np.zeros((3, num_stages, table.num_ranks))
    last = WEIGHTS if slicing.zero_bubble else BACKWARD  # until then a slice holds about what its layers saved
    for ranks, stage, units, ways in _orders(table, slicing, num_stages, num_chunks):
        if stages is not None and stage not in stages:
            continue
        forward, backward = (ways == FORWARD) * 1.0, (ways == BACKWARD) * 1.0
        of_own, of_kept = slices.own[units] * (forward - (ways == last)), slices.kept[units] * (forward - backward)
        changes = np.stack((of_own, of_kept, summed[units] * backward))
        over_time = np.cumsum(changes, axis=2) / num_chunks
        of_parts = over_time * np.array([layer.activations, layer.keys, layer.key_sums])[:, None, None]
        found[:2, stage, ranks] = over_time[:2].max(axis=2)
        peak = of_parts.sum(axis=0).argmax(axis=1)
        parts[:, stage, ranks] = np.take_along_axis(of_parts, peak[None, :, None], axis=2)[:, :, 0]
        found[2, stage, ranks] = parts[:, stage, ranks].sum(axis=0)
    tokens, kept_keys, layer_bytes = found
    return Held(tokens, kept_keys, layer_bytes, parts)


def held_slices(
    schedule: SliceSchedule, stage: int, lengths: Sequence[float], kept_tokens: float, layer: LayerBytes
) -> tuple[HeldSlices, ...]:
    """Return what a stage holds at each backward pass of a slice, of micro-batches that are all cut alike.

    Args:
        schedule: what the stages run.
        stage: the stage.
        lengths: tokens of each slice on this rank.
        kept_tokens: of other ranks, whose keys each micro-batch keeps; slices add them in proportion to their tokens.
        layer: bytes of a token's key and value, and of the sums of their gradients.
    """
    others = 1.0 + kept_tokens / sum(lengths)
    copies = 4 if kept_tokens else 2  # keys and gradients of a kernel call; in rings a sum here, and one that travels
    sums = [others * layer.key_sums * length for length in lengths]
    tokens = of_sums = 0.0
    found = set()
    for action in schedule.stages[stage]:
        index = action.slice_index
        if action.kind == "F":
            tokens += lengths[index]
            continue
        before = of_sums  # of the layers that the backward pass has not reached yet
        of_sums += sum(sums[:index]) if index == len(lengths) - 1 else -sums[index]
        of_keys = others * layer.keys * tokens
        share, gathered = 1 / schedule.num_chunks, copies * layer.keys * sum(lengths[: index + 1])
        held_bytes = share * (of_keys + max(before, of_sums))
        found.add(HeldSlices(lengths[index], share * tokens, held_bytes, gathered))
        tokens -= lengths[index]
    return tuple(sorted(found, key=astuple))


def _orders(
    table: ShardTable, slicing: Slicing, num_stages: int, num_chunks: int
) -> Iterator[tuple[Ints, int, Ints, Ints]]:
    """Yield for ranks with equal counts: ranks [r], stage, slices that it runs [r, actions], the ways [actions]."""
    orders = partial(work_orders, num_stages, slicing=slicing, num_chunks=num_chunks)
    for count in np.unique(table.counts[table.counts > 0]).tolist():
        ranks = np.flatnonzero(table.counts == count)
        for stage, order in enumerate(orders(count)):
            ways, place, _ = order.T
            yield ranks, stage, table.offsets[ranks][:, None] * slicing.num_slices + place, ways
