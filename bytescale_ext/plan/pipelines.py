"""The balance scheduler for aligned slots: pipelines, virtual stages, expert parallelism.

What counts is not the sum of a pipeline's slots alone: its fill and drain cost as well, and a tall slot costs
``num_stages - 1`` times its height again wherever its neighbours are lower. So rings are as wide as their exchange
allows, shelves of one height go over many ranks (``pipelines_shelves``), shelves rise to the tallest and fall after it,
the first and last slots hold few short sequences, and ranks with tall slots get less work in all. How much of each is
best depends on the lengths: a few dozen shapes are built and timed (``pipelines_clock``), and the fastest is taken.

Slices (Seq1F1B) make fill and drain k times shorter, so a tall slot costs less; but where keys are not kept each
slice's exchange brings those of all tokens before it, so rings are narrower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.balance import longest_seconds, mean_seconds
from bytescale_ext.plan.cost import CostModel, SliceShares, StageCost
from bytescale_ext.plan.moldable import ShouldStop, stop_if
from bytescale_ext.plan.packing import deal_by_work, fill_slots
from bytescale_ext.plan.pipelines_clock import run_pipelines, slot_seconds
from bytescale_ext.plan.pipelines_shapes import CHOICES, SLICED_STARTS, STARTS, Shape
from bytescale_ext.plan.pipelines_shelves import Region, RingWork, Shelf, cut_regions, fill_shelves
from bytescale_ext.plan.placed import PlacedRanks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_WORK = 30_000_000  # array entries that the search may touch: what bounds its time
_MOST_SHAPES = 32
_ROUNDS = 2  # times that the short sequences of a shape are dealt
_GOOD = 1.01  # a plan this near to the lower bound ends the search
_ROOMS = (1.02, 1.15, 2.0)  # for short sequences, in their tokens; twice as much always is enough
_RAMP = 0.75  # slots at either end that are smaller than the others, as a share of the stages


@dataclass(frozen=True, eq=False)
class _Step:
    """The step to plan, sequences by length, longest first (tie: lower index)."""

    lengths: Ints
    least: Ints
    num_ranks: int
    tokens_per_rank: int
    stage: StageCost
    num_stages: int
    num_slices: int
    kept_tokens: int
    node: int
    eager: bool

    @property
    def cost(self) -> CostModel:
        return self.stage.both

    @property
    def fill(self) -> float:
        """How often a slot counts again until all stages are full and empty again."""
        return (self.num_stages - 1) / self.num_slices

    @property
    def launch(self) -> float:
        """What a slot costs without any tokens."""
        return self.cost.g * self.num_slices

    @property
    def seconds(self) -> Floats:
        """Work of each sequence on one rank: [n]."""
        sizes = self.lengths.astype(np.float64)
        return np.asarray(self.cost.a * sizes * sizes + self.cost.b * sizes)

    def ring_seconds(self, lengths: Floats, widths: Floats) -> Floats:
        """All slices of each sequence on each rank of its ring, without launches: [n], lengths and widths [n]."""
        (forward, _), (backward, _) = self.stage.slice_costs(lengths, widths, self._cut(lengths, widths))
        return np.asarray((forward + backward).sum(axis=1))

    @property
    def hidden_widths(self) -> Ints:
        """The most ranks of each sequence over which the exchange of each of its slices hides behind attention: [n]."""
        if not self.cost.c:
            return np.full(len(self.lengths), self.num_ranks)
        cut = self._cut(self.lengths.astype(np.float64), np.full(len(self.lengths), 2.0))
        exchange = self.stage.forward.c * cut.exchanged + self.stage.backward.c * cut.backward(self.stage).exchanged
        most = self.lengths * self.cost.a * (cut.squares / exchange).min(axis=1) + 1
        return np.minimum(most, self.num_ranks).astype(np.int64)

    def _cut(self, lengths: Floats, widths: Floats) -> SliceShares:
        return SliceShares.of(self.cost, lengths, widths, self.num_slices, self.kept_tokens)

    def size(self, placed: PlacedRanks) -> int:
        """About how many array entries one shape of this step touches."""
        actions = 2 * self.num_stages * self.num_slices
        return (len(self.lengths) + self.num_ranks * actions) * (int(placed.orders.max()) + 2)


def place_pipelined(
    lengths: Ints,
    least: Ints,
    num_ranks: int,
    tokens_per_rank: int,
    stage: StageCost,
    num_stages: int,
    num_slices: int,
    kept_tokens: int,
    node: int,
    eager: bool = False,
    should_stop: ShouldStop = None,
) -> PlacedRanks:
    """Place a step in aligned slots for the shortest time of all pipelines.

    Args:
        lengths: tokens of each sequence: [n].
        least: the fewest ranks of each sequence that its memory allows: [n].
        num_ranks: pipelines.
        tokens_per_rank: C.
        stage: cost of one stage.
        num_stages: p, 1 without pipelines.
        num_slices: k slices of each slot.
        kept_tokens: keys of rings' sequences up to this length are kept between slices.
        node: HDP ranks of a node.
        eager: slices run in the eager order, see ``seq1f1b.SliceSchedule``.
        should_stop: see ``HdpPlanner``.
    """
    if not len(lengths):
        return PlacedRanks(num_ranks, lengths, lengths, lengths, lengths, aligned=True)
    in_order = np.argsort(-lengths, kind="stable")
    sized = (lengths[in_order], least[in_order], num_ranks, tokens_per_rank)
    step = _Step(*sized, stage, num_stages, num_slices, kept_tokens, node, eager)
    placed = _best_shape(step, should_stop)
    back = np.argsort(in_order, kind="stable")
    return replace(
        placed,
        lengths=lengths,
        first_ranks=placed.first_ranks[back],
        widths=placed.widths[back],
        orders=placed.orders[back],
    )


def _best_shape(step: _Step, should_stop: ShouldStop) -> PlacedRanks:
    """Take the best of some shapes, then change one attribute at a time and keep what is faster."""
    sized = (step.lengths, step.least, step.num_ranks, step.tokens_per_rank, step.cost)
    bound = max(
        mean_seconds(*sized), (1 + step.fill) * longest_seconds(step.lengths, step.least, step.num_ranks, step.cost)
    )
    tries = list(STARTS if step.num_slices == 1 else SLICED_STARTS)
    best = _timed(step, tries[0])
    work = step.size(best.placed)
    seen = {best.shape}
    while tries:
        for shape in tries:
            if shape in seen:
                continue
            if len(seen) >= _MOST_SHAPES or work >= _MOST_WORK or best.seconds <= _GOOD * bound:
                return best.placed
            stop_if(should_stop)
            seen.add(shape)
            timed = _timed(step, shape)
            work += step.size(timed.placed)
            best = min(best, timed, key=lambda timed: timed.seconds)
        tries = [replace(best.shape, **{name: value}) for name, values in CHOICES.items() for value in values]
        tries = [shape for shape in tries if shape not in seen]
    return best.placed


@dataclass(frozen=True, eq=False)
class _Timed:
    shape: Shape
    placed: PlacedRanks
    seconds: float


def _timed(step: _Step, shape: Shape) -> _Timed:
    """The plan of a shape: built, timed, and built again with short sequences moved to the ranks that end early."""
    shelved = _shelve(step, shape)
    estimate = shelved.loads + shape.peak * step.fill * np.maximum(shelved.tallest, shelved.pack_seconds)
    best: _Timed | None = None
    for _ in range(_ROUNDS):
        placed, short_seconds = _with_shorts(step, shape, shelved, estimate)
        if step.size(placed) > _MOST_WORK:  # too large for any search
            return _Timed(shape, placed, np.inf)
        slots = slot_seconds(placed, step.stage, step.num_slices, step.kept_tokens)
        finish = run_pipelines(slots, step.num_stages, step.eager)
        timed = _Timed(shape, placed, float(finish.max()))
        best = timed if best is None or timed.seconds < best.seconds else best
        estimate = finish - short_seconds
    assert best is not None
    return best


@dataclass(frozen=True, eq=False)
class _Shelved:
    """Rings in their slots, before short sequences are added.

    Attributes:
        regions: see ``Region``.
        num_rings: the first so many sequences are rings.
        front: slots before the first shelf.
        ends: slots of front and shelves of each rank: [num_ranks].
        first_ranks, widths, slots: of each sequence: [n].
        wishes: seconds that each rank's slot lacks to the height of its shelf, -inf where is none: [ranks, slots].
        room: tokens that it still holds: [ranks, slots].
        loads: seconds of each rank's rings: [num_ranks].
        tallest: its tallest ring: [num_ranks].
        pack_seconds: a short micro-batch of the shape's size.
    """

    regions: tuple[Region, ...]
    num_rings: int
    front: int
    ends: Ints
    first_ranks: Ints
    widths: Ints
    slots: Ints
    wishes: Floats
    room: Ints
    loads: Floats
    tallest: Floats
    pack_seconds: float


def _shelve(step: _Step, shape: Shape) -> _Shelved:
    """Cut regions, put their rings on shelves, and give the shelves their slots."""
    cost, num_ranks, capacity = step.cost, step.num_ranks, step.tokens_per_rank
    regions, num_rings = _regions(step, shape)
    front = round(shape.front * (1 + step.fill)) if step.num_stages > 1 else 0
    num_slots = front + max(len(region.shelves) for region in regions)
    firsts, slots = (np.zeros(len(step.lengths), dtype=np.int64) for _ in range(2))
    widths = np.ones(len(step.lengths), dtype=np.int64)
    ends = np.full(num_ranks, front, dtype=np.int64)
    wishes = np.full((num_ranks, num_slots), -np.inf)
    room = np.zeros((num_ranks, num_slots), dtype=np.int64)
    room[:, :front] = capacity
    loads, tallest = np.zeros(num_ranks), np.zeros(num_ranks)
    for region in regions:
        ranks = slice(region.first, region.stop)
        ends[ranks] += len(region.shelves)
        for place, number in enumerate(_rising_and_falling(region.shelves, shape.before)):
            shelf, slot = region.shelves[number], front + place
            firsts[shelf.rings], widths[shelf.rings], slots[shelf.rings] = shelf.first_ranks, shelf.widths, slot
            own, tokens = _on_ranks(step, shelf)
            wishes[ranks, slot] = shelf.height - own[ranks]
            room[ranks, slot] = np.maximum(capacity - tokens[ranks], 0)
            loads[ranks] += own[ranks] + step.launch
            tallest[ranks] = np.maximum(tallest[ranks], own[ranks])
    pack_seconds = cost.b * shape.pack * capacity + step.launch
    return _Shelved(regions, num_rings, front, ends, firsts, widths, slots, wishes, room, loads, tallest, pack_seconds)


def _regions(step: _Step, shape: Shape) -> tuple[tuple[Region, ...], int]:
    """The regions with their shelves, and how many sequences are rings."""
    num_ranks = step.num_ranks
    mean = float(step.seconds.sum()) / num_ranks
    height = max(shape.height * mean, 1e-300)
    most = np.minimum(step.hidden_widths * shape.spread, num_ranks).astype(np.int64)
    most = np.maximum(np.minimum(most, step.lengths), step.least)
    is_long = step.lengths > step.tokens_per_rank
    num_rings = int((is_long | ((step.seconds > height) & (most > 1))).sum())
    rings = slice(0, num_rings)
    work = RingWork(step.lengths[rings].astype(np.float64), step.seconds[rings], step.least[rings], most[rings])
    peak = shape.peak * step.fill
    cuts = cut_regions(work, num_ranks, step.node, height, shape.budget * mean, peak, shape.num_regions)
    regions = tuple(
        fill_shelves(work, first, stop, begin, end, step.node, height, step.ring_seconds)
        for first, stop, begin, end in cuts
    )
    return regions, num_rings


def _on_ranks(step: _Step, shelf: Shelf) -> tuple[Floats, Ints]:
    """Seconds and tokens of a shelf's rings on each rank: [num_ranks] each."""
    own, tokens = np.zeros(step.num_ranks), np.zeros(step.num_ranks, dtype=np.int64)
    ranks = np.repeat(shelf.first_ranks - (np.cumsum(shelf.widths) - shelf.widths), shelf.widths)
    ranks += np.arange(len(ranks))
    each = step.ring_seconds(step.lengths[shelf.rings].astype(np.float64), shelf.widths.astype(np.float64))
    own[ranks] = np.repeat(each, shelf.widths)
    tokens[ranks] = np.repeat(-(-step.lengths[shelf.rings] // shelf.widths), shelf.widths)
    return own, tokens


def _rising_and_falling(shelves: tuple[Shelf, ...], before: float) -> list[int]:
    """Order of a region's shelves: about the share ``before`` rises to the tallest, the others fall after it."""
    heights = np.array([shelf.height for shelf in shelves])
    rising: list[int] = []
    falling: list[int] = []
    for number in np.argsort(-heights, kind="stable").tolist():
        is_rising = len(rising) < before * len(rising + falling)
        (rising if is_rising and falling else falling).append(number)
    return rising[::-1] + falling


def _with_shorts(step: _Step, shape: Shape, shelved: _Shelved, loads: Floats) -> tuple[PlacedRanks, Floats]:
    """Deal the short sequences to the ranks by ``loads`` and fill shelves, front and end with them.

    Returns:
        The plan, and the seconds of short sequences on each rank: [num_ranks].
    """
    shorts = np.arange(shelved.num_rings, len(step.lengths))
    pack = max(1.0, shape.pack * step.tokens_per_rank)
    work = step.seconds[shorts] + step.launch / pack * step.lengths[shorts]
    firsts, slots = shelved.first_ranks.copy(), shelved.slots.copy()
    firsts[shorts] = deal_by_work(work, loads)
    for room in _ROOMS:
        slots[shorts] = _short_slots(step, shape, shelved, shorts, work, firsts[shorts], room)
        if (slots[shorts] >= 0).all():
            break
    slots = _dense(firsts, slots, shelved.widths, shelved.regions)
    placed = PlacedRanks(step.num_ranks, step.lengths, firsts, shelved.widths, slots, aligned=True)
    seconds = np.bincount(firsts[shorts], weights=work, minlength=step.num_ranks).astype(np.float64)
    return placed, seconds


def _short_slots(
    step: _Step, shape: Shape, shelved: _Shelved, shorts: Ints, work: Floats, ranks: Ints, room: float
) -> Ints:
    """The slot of each short sequence: shelves are filled to their height, the rest rises in front and falls behind.

    ``room``: of the slots at the end, in tokens of the rank's short sequences, at least. -1: no slot has room.
    """
    front, ends = shelved.front, shelved.ends
    capacity = step.tokens_per_rank
    tokens = step.lengths[shorts]
    of_rank = np.bincount(ranks, weights=tokens, minlength=step.num_ranks)
    ramp = round(_RAMP * (1 + step.fill)) if step.num_stages > 1 else 0
    fewest = np.ceil(room * of_rank / capacity)
    packs = np.ceil(of_rank / (shape.pack * capacity))
    num_ends = np.maximum(fewest, packs + ramp // 2 - front).astype(np.int64)
    slot = np.arange(int((ends + num_ends).max()))
    wishes = np.full((step.num_ranks, len(slot)), -np.inf)
    wishes[:, : shelved.wishes.shape[1]] = shelved.wishes
    rooms = np.zeros(wishes.shape, dtype=np.int64)
    rooms[:, : shelved.room.shape[1]] = shelved.room
    last = (ends + num_ends)[:, None]
    is_end = (slot >= ends[:, None]) & (slot < last)
    rooms[is_end] = capacity
    weights = np.where(is_end, np.minimum(1.0, (last - slot - 0.5) / max(ramp, 0.5)), 0.0)
    weights[:, :front] = np.minimum(1.0, np.arange(1, front + 1) / (ramp + 1))
    spare = np.bincount(ranks, weights=work, minlength=step.num_ranks).astype(np.float64)
    spare -= np.where(np.isfinite(wishes), np.clip(wishes, 0.0, None), 0.0).sum(axis=1)
    share = weights * (np.maximum(spare, 0.0) / np.maximum(weights.sum(axis=1), 1e-300))[:, None]
    return fill_slots(tokens, work, ranks, rooms, np.where(weights > 0, share, wishes))


def _dense(firsts: Ints, slots: Ints, widths: Ints, regions: tuple[Region, ...]) -> Ints:
    """Leave out slots that no rank of a region uses, and those of a rank after its last ring that it does not use."""
    dense = slots.copy()
    for region in regions:
        inside = (firsts >= region.first) & (firsts < region.stop)
        dense[inside] = np.unique(dense[inside], return_inverse=True)[1]
    num_ranks = max((region.stop for region in regions), default=0)
    last = np.full(num_ranks + 1, -1, dtype=np.int64)
    in_ring = np.flatnonzero(widths > 1)
    for seq in in_ring.tolist():
        window = slice(firsts[seq], firsts[seq] + widths[seq])
        last[window] = np.maximum(last[window], dense[seq])
    free = np.flatnonzero((widths == 1) & (dense > last[firsts]))
    keys, inverse = np.unique(firsts[free] * (int(dense.max(initial=0)) + 1) + dense[free], return_inverse=True)
    owners = keys // (int(dense.max(initial=0)) + 1)
    begins = np.searchsorted(owners, owners)
    dense[free] = last[firsts[free]] + 1 + (np.arange(len(keys)) - begins)[inverse]
    return dense
