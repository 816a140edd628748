"""Peak memory of pipeline stages that run a plan: activations, kept keys, and sums of key gradients.

A slice's activations and keys live from its forward to its backward pass. With slices, the backward pass of a
micro-batch's last slice adds to the gradient sums of all earlier slices, and each slice's sum ends with its own
backward pass (``attention/slices.py``). The peak follows from the order of work alone and needs no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter, ge

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

MANY_GROUPS = 3
"""Number of groups of micro-batches after which more groups do not raise the peak memory of a pipeline."""

_ENTRIES = attrgetter(*(entry.name for entry in fields(HeldSlices)))


@dataclass(frozen=True, eq=False)
class PeakMemory:
    """Peak memory of each stage of each HDP rank in a plan: [p, num_ranks] each. An HDP rank is one pipeline.

    Attributes:
        tokens: tokens of the rank with activations in memory; with virtual stages, in all their layers.
        kept_keys: tokens of other ranks with keys that are kept from slice to slice.
        layer_bytes: bytes in one layer of activations, kept keys and sums of key gradients; keys that are read back and
            rotary angles count in the mean of the layers.
        host_keys: tokens with keys in host memory.
        parts: bytes of the stage at its peak, without model states: activations; keys of other ranks or read back;
            sums; memory of running passes, with the logits of slices before their backward pass: [4, p, num_ranks].
    """

    tokens: Floats
    kept_keys: Floats
    layer_bytes: Floats
    host_keys: Floats
    parts: Floats

    def host_bytes(self, memory: StageMemory) -> float:
        """Return the host memory of the device that swaps most keys, in bytes."""
        return float((self.host_keys.max(axis=1) * np.array(memory.num_layers)).max()) * memory.layer.keys

    def stage_host_bytes(self, memory: StageMemory) -> list[float]:
        """Return the host memory of each stage, in bytes, on the device that swaps most keys."""
        of_stages = self.host_keys.max(axis=1) * np.array(memory.num_layers) * memory.layer.keys
        return [float(each) for each in of_stages]

    def device_bytes(self, memory: StageMemory) -> float:
        """Return the bytes of the fullest device, on stages of this memory."""
        most = np.maximum(self.parts.sum(axis=0).max(axis=1), memory.stage_updates)
        return float((most + np.array(memory.state_bytes)).max())

    def stage_parts(self, memory: StageMemory) -> list[DeviceParts]:
        """Return the bytes by kind of the fullest device of each stage."""
        of_stages = []
        for stage, (states, update) in enumerate(zip(memory.state_bytes, memory.stage_updates, strict=True)):
            of_ranks = self.parts[:, stage]
            activations, keys, sums, working = of_ranks[:, of_ranks.sum(axis=0).argmax()].tolist()
            of_stages.append(DeviceParts(activations, keys, sums, states, working, update))
        return of_stages

    def device_parts(self, memory: StageMemory) -> DeviceParts:
        """Return the bytes by kind of the fullest device."""
        return max(self.stage_parts(memory), key=lambda parts: parts.total)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Bytes of a device at its peak: in a pass, or in the update, when only model states exist.

    Attributes:
        activations: activations, with each slice's own keys.
        keys: keys of other ranks that are kept, or keys that are read back from host memory.
        sums: sums of key gradients.
        states: parameters, gradients and optimizer states.
        working: gradients of a layer or logits, and the logits of other slices.
        update: memory of the update.
    """

    activations: float
    keys: float
    sums: float
    states: float
    working: float
    update: float = 0.0

    @property
    def peaks_in_update(self) -> bool:
        """Whether the update has the peak."""
        return self.update > self._of_passes

    @property
    def _of_passes(self) -> float:
        return self.activations + self.keys + self.sums + self.working

    @property
    def total(self) -> float:
        """Bytes of the peak."""
        return self.states + max(self.update, self._of_passes)


@dataclass(frozen=True, eq=False)
class _Slices:
    """Tokens of each slice, micro-batch by micro-batch: [slices] each.

    Attributes:
        own: tokens of the rank.
        kept: tokens of other ranks with keys that are kept.
        kept_sums: tokens of other ranks with sums of key gradients that are kept too.
        own_swapped: tokens of the rank with keys in host memory.
        swapped: tokens of the rank and of other ranks with keys in host memory.
    """

    own: Floats
    kept: Floats
    kept_sums: Floats
    own_swapped: Floats
    swapped: Floats

    @classmethod
    def of(cls, table: ShardTable, cost: CostModel, slicing: Slicing) -> _Slices:
        lengths, widths = table.lengths.astype(np.float64), table.widths.astype(np.float64)
        slice_shares = SliceShares.of(cost, lengths, widths, slicing)
        shares = np.where((widths == 1)[:, None], local_shares(table, cost, slicing.num_slices), slice_shares.tokens)
        cells = (table.rows[:, None] * slicing.num_slices + np.arange(slicing.num_slices)).ravel()
        of_others = np.where(slice_shares.kept & (widths > 1), lengths - table.tokens, 0.0)
        num_cells = table.num_rows * slicing.num_slices

        def of_slices(whole: Floats | Ints) -> Floats:
            if not whole.any():
                return np.zeros(num_cells)
            return np.bincount(cells, (whole[:, None] * shares).ravel(), num_cells)

        return cls(
            own=of_slices(table.tokens),
            kept=of_slices(of_others * ~slice_shares.swapped),
            kept_sums=of_slices(of_others * slice_shares.summed),
            own_swapped=of_slices(table.tokens * slice_shares.swapped),
            swapped=of_slices(lengths * slice_shares.swapped),
        )

    def summed(self, num_slices: int) -> Floats:
        """Return the change of the tokens with sums of key gradients by the backward pass of each slice: [slices]."""
        tokens = (self.own + self.kept_sums).reshape(-1, num_slices)
        changes = -tokens
        changes[:, -1] = tokens[:, :-1].sum(axis=1)
        return changes.ravel()

    def read(self, num_slices: int) -> Floats:
        """Return the tokens with swapped keys that attention of each slice reads: [slices]."""
        return np.cumsum(self.swapped.reshape(-1, num_slices), axis=1).ravel()


def peak_memory(
    table: ShardTable,
    slicing: Slicing,
    cost: CostModel,
    memory: StageMemory,
    num_chunks: int = 1,
    stages: Sequence[int] | None = None,
) -> PeakMemory:
    """Return the peak memory of each stage.

    Args:
        table: the plan; ranks are pipelines.
        slicing: slices of a micro-batch.
        cost: cost model that gives all slices equal costs.
        memory: memory of the pipeline's stages.
        num_chunks: virtual stages of each stage.
        stages: the stages that are evaluated; other stages stay at 0. None: all stages.
    """
    memory = memory if slicing.num_slices > 1 else memory.unsliced()
    slices, num_stages, layer = _Slices.of(table, cost, slicing), len(memory.num_layers), memory.layer
    summed, read = slices.summed(slicing.num_slices), slices.read(slicing.num_slices)
    rows = slices.own if memory.rows_multiple == 1 else padded_rows(slices.own, memory.rows_multiple)
    attended = np.cumsum(rows.reshape(-1, slicing.num_slices), axis=1).ravel()
    peaks, parts = np.zeros((4, num_stages, table.num_ranks)), np.zeros((4, num_stages, table.num_ranks))
    bytes_of_token = np.array([layer.activations, layer.keys, layer.key_sums])[:, None, None]
    is_swapped = bool(slices.swapped.any())
    last = WEIGHTS if slicing.zero_bubble else BACKWARD  # the pass after which a slice's activations are free
    for ranks, stage, units, ways in _orders(table, slicing, num_stages, num_chunks, stages):
        forward, backward = (ways == FORWARD) * 1.0, (ways == BACKWARD) * 1.0
        of_own, of_kept = rows[units] * (forward - (ways == last)), slices.kept[units] * (forward - backward)
        over_time = np.cumsum((of_own, of_kept, summed[units] * backward), axis=2) / num_chunks
        in_layer = over_time * bytes_of_token
        in_layer[0] += over_time[0] * layer.angles * num_chunks / max(1, memory.num_layers[stage])
        if is_swapped:
            changes = np.stack((slices.swapped[units], slices.own_swapped[units])) * (forward - backward)
            in_host = np.cumsum(changes, axis=2) / num_chunks
            in_layer[0] -= in_host[1] * layer.keys
            in_layer[1] += _in_two_layers(read[units]) * layer.keys / memory.num_layers[stage]
            peaks[3, stage, ranks] = in_host[0].max(axis=1)
        peaks[:3, stage, ranks] = [each.max(axis=1) for each in (*over_time[:2], in_layer.sum(axis=0))]
        passes = _of_passes(memory, stage, rows[units], attended[units], ways)
        if slicing.receives_ahead and stage and memory.passes is not None:
            passes += memory.passes.message * _of_next_forward(rows[units], ways)
        if stage == num_stages - 1 and slicing.num_slices > 1:
            waiting = np.cumsum(rows[units] * (forward - backward), axis=1) / num_chunks
            passes += layer.head * np.maximum(0.0, waiting - rows[units])
        in_stage = np.concatenate((in_layer * memory.num_layers[stage], passes[None]))
        peak = in_stage.sum(axis=0).argmax(axis=1)
        parts[:, stage, ranks] = np.take_along_axis(in_stage, peak[None, :, None], axis=2)[:, :, 0]
    tokens, kept_keys, layer_bytes, host_keys = peaks
    return PeakMemory(tokens, kept_keys, layer_bytes, host_keys, parts)


def _of_passes(memory: StageMemory, stage: int, tokens: Floats, attended: Floats, ways: Ints) -> Floats:
    """Return the bytes that passes take in addition to the held bytes after each action: [r, actions].

    A backward pass begins with all bytes that are held after the previous action. So each action counts the larger of
    its own bytes and the bytes of the next backward pass.

    Args:
        memory: memory of the stages.
        stage: number of the stage.
        tokens: tokens of each action's slice, [r, actions].
        attended: tokens up to the end of that slice, [r, actions].
        ways: kinds of the actions, [actions].
    """
    forward, backward = memory.working(stage, tokens, attended)
    own = np.where(ways == FORWARD, forward, np.where(ways == BACKWARD, backward, 0.0))
    following = np.where(ways == BACKWARD, backward, 0.0)[:, 1:]
    own[:, :-1] = np.maximum(own[:, :-1], following)
    return own + memory.buffer_bytes * tokens.max(axis=1, keepdims=True)


def _of_next_forward(tokens: Floats, ways: Ints) -> Floats:
    """Return the tokens of the next forward pass after each action: [r, actions]. Its input is received meanwhile.

    Args:
        tokens: tokens of each action's slice: [r, actions].
        ways: kinds of the actions: [actions].

    Returns 0 after the last forward pass.
    """
    forward = np.flatnonzero(ways == FORWARD)
    following = np.searchsorted(forward, np.arange(len(ways)), side="right")
    padded = np.concatenate((tokens[:, forward], np.zeros((len(tokens), 1))), axis=1)
    return np.asarray(padded[:, following])


def local_shares(table: ShardTable, cost: CostModel, num_slices: int) -> Floats:
    """Return the shares of each shard's tokens in the slices of its micro-batch, as if it were on one rank: [n, k].

    The documents of a micro-batch that are on one rank are laid end to end and cut together into slices of equal cost
    (``schedule/document_slices.py``), so the first slices have more tokens of a long document. Rows of documents in
    rings have no meaning.
    """
    lengths, is_local = table.lengths.astype(np.float64), table.widths == 1
    work = np.where(is_local, cost.a * cost.squares(lengths) + cost.b * lengths, 0.0)
    in_order = np.argsort(table.rows, kind="stable")
    begins, totals = np.zeros(len(work)), np.bincount(table.rows, weights=work, minlength=table.num_rows)
    begins[in_order] = np.cumsum(work[in_order]) - work[in_order]
    begins -= (np.cumsum(totals) - totals)[table.rows]
    targets = totals[table.rows][:, None] * np.arange(1, num_slices) / num_slices
    shares = np.clip((targets - begins[:, None]) / np.maximum(work, 1e-300)[:, None], 0.0, 1.0)
    ends = cost.end_of_share(lengths[:, None], shares, np.ones((len(lengths), 1))) / lengths[:, None]
    return np.diff(ends, axis=1, prepend=0.0, append=1.0)


def padded_rows(tokens: Floats, rows_multiple: int) -> Floats:
    """Return the rows of slices of these tokens, both [slices]: a multiple of ``rows_multiple``, and not 0."""
    whole = np.ceil(np.round(tokens / rows_multiple, 9))
    return np.asarray(np.maximum(whole, 1.0) * rows_multiple)


def _in_two_layers(read: Floats) -> Floats:
    """Return the tokens with swapped keys that are on the device at each action: [r, actions].

    They are in the layer that runs and in the next layer; after the last layer, in the first layer of the next action.
    ``read``: tokens that each action reads, [r, actions].
    """
    following = np.concatenate((read[:, 1:], np.zeros((len(read), 1))), axis=1)
    return np.asarray(read + np.maximum(read, following))


def held_slices(
    schedule: SliceSchedule,
    stage: int,
    lengths: Sequence[float],
    kept_tokens: float,
    layer: LayerBytes,
    is_swapped: bool = False,
) -> tuple[HeldSlices, ...]:
    """Return the held tokens and bytes of a stage at each backward pass of a slice, for micro-batches of equal slices.

    Args:
        schedule: order of the passes of all stages.
        stage: number of the stage.
        lengths: tokens of each slice on this rank.
        kept_tokens: tokens of other ranks with keys that each micro-batch keeps; slices add them in proportion to
            their tokens.
        layer: bytes of a token's key and value, and of the sums of their gradients; ``head`` only on the last stage.
        is_swapped: whether the keys of all layers except two are in host memory.
    """
    others = 1.0 + kept_tokens / sum(lengths)
    copies = 4 if kept_tokens else 2  # keys and gradients of a kernel call; in rings a local and a travelling sum
    sums = [others * layer.key_sums * length for length in lengths]
    tokens = of_sums = 0.0
    moments = set()
    for action in schedule.stages[stage]:
        index = action.slice_index
        if action.kind == "F":
            tokens += lengths[index]
            continue
        before = of_sums  # sums of the layers that the backward pass has not reached yet
        of_sums += sum(sums[:index]) if index == len(lengths) - 1 else -sums[index]
        share, attended = 1 / schedule.num_chunks, layer.keys * sum(lengths[: index + 1])
        of_keys = share * others * layer.keys * tokens
        on_device, in_host = (0.0, of_keys) if is_swapped else (of_keys, 0.0)
        held_bytes, read = on_device + share * max(before, of_sums), 2 * others * attended * is_swapped
        head = layer.head * max(0.0, share * tokens - lengths[index])
        moments.add(HeldSlices(lengths[index], share * tokens, held_bytes, copies * attended, read, in_host, head))
        tokens -= lengths[index]
    return most_held(moments)


def most_held(found: Iterable[HeldSlices]) -> tuple[HeldSlices, ...]:
    """Return the moments that decide the memory of a device.

    A moment is left out if another moment runs the same slice and stores at least as much of everything.
    """
    kept: dict[float, list[HeldSlices]] = {}
    for one in sorted(found, key=_ENTRIES, reverse=True):
        others = kept.setdefault(one.running, [])
        if not any(all(map(ge, _ENTRIES(other), _ENTRIES(one))) for other in others):
            others.append(one)
    return tuple(one for of_slice in kept.values() for one in of_slice)


def _orders(
    table: ShardTable, slicing: Slicing, num_stages: int, num_chunks: int, stages: Sequence[int] | None
) -> Iterator[tuple[Ints, int, Ints, Ints]]:
    """Yield (ranks [r], stage, its slices [r, actions], kinds of its actions [actions]) for ranks with equal counts.

    ``stages``: stages to yield; None yields all.
    """
    orders = partial(work_orders, num_stages, slicing=slicing, num_chunks=num_chunks)
    for count in np.unique(table.counts[table.counts > 0]).tolist():
        ranks = np.flatnonzero(table.counts == count)
        of_stages = orders(count)
        for stage in range(num_stages) if stages is None else stages:
            ways, place, _ = of_stages[stage].T
            yield ranks, stage, table.offsets[ranks][:, None] * slicing.num_slices + place, ways
