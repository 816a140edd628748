from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.plan.hdp.packing import fill_slots, pack_best_fit, split_into_packs
from tests.sample import examples


def packed_slowly(lengths: list[int], indices: list[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Return packs by the definition of best-fit-decreasing, in quadratic time."""
    packs: list[list[int]] = []
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        room = [capacity - sum(lengths[other] for other in pack) for pack in packs]
        fitting = [number for number in range(len(packs)) if room[number] >= lengths[index]]
        if fitting:
            packs[min(fitting, key=lambda number: (room[number], number))].append(index)
        else:
            packs.append([index])
    return tuple(tuple(pack) for pack in packs)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 100))
def test_packs_are_those_of_the_definition(lengths: list[int], capacity: int) -> None:
    assert pack_best_fit(lengths, range(len(lengths)), capacity) == packed_slowly(
        lengths, list(range(len(lengths))), capacity
    )


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80), st.integers(5000, 9000), st.data())
def test_each_item_once_within_capacity_and_few_packs(lengths: list[int], capacity: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    packs = pack_best_fit(lengths, indices, capacity)
    assert sorted(index for pack in packs for index in pack) == sorted(indices)
    sums = [sum(lengths[index] for index in pack) for pack in packs]
    assert all(0 < total <= capacity for total in sums)
    # two packs that are at most half full would be one pack
    assert sum(2 * total <= capacity for total in sums) <= 1
    assert packs == packed_slowly(lengths, indices, capacity)


def test_the_fullest_pack_that_fits_is_chosen_and_then_the_oldest() -> None:
    # 6 | 5 | then 3 fits pack 0 (4 left) tighter than pack 1 (5 left)
    assert pack_best_fit([6, 5, 5, 3], [0, 1, 3], 10) == ((0, 3), (1,))
    # packs 0 and 1 have the same room, so the older pack
    assert pack_best_fit([6, 6, 2], [0, 1, 2], 10) == ((0, 2), (1,))
    # among equal lengths the lower index is first, for any order of the indices
    assert pack_best_fit([4, 4, 4], [2, 0, 1], 8) == ((0, 1), (2,))


def test_large_capacities_cross_words_of_the_residual_set() -> None:
    lengths = [5000, 3000, 1500, 1024, 1023, 1, 2048, 4096]
    for capacity in (5000, 5001, 8192, 100_000):
        assert pack_best_fit(lengths, range(8), capacity) == packed_slowly(lengths, list(range(8)), capacity)


@pytest.mark.parametrize(("lengths", "words"), [([2, 9], "sequence 1 has 9 tokens"), ([2, 0], "sequence 1 has 0")])
def test_impossible_items_are_named(lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_best_fit(lengths, range(2), 8)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4)), max_size=60), st.integers(40, 90))
def test_packs_of_all_owners_are_best_fit_of_each(items: list[tuple[int, int]], capacity: int) -> None:
    tokens, owners = (np.array([item[part] for item in items], dtype=np.int64) for part in (0, 1))
    packs = split_into_packs(tokens, owners, capacity)
    for owner in range(5):
        rooms: list[int] = []
        for item in np.flatnonzero(owners == owner).tolist():
            fitting = [number for number, room in enumerate(rooms) if room >= tokens[item]]
            if not fitting:
                rooms.append(capacity)
                fitting = [len(rooms) - 1]
            wanted = min(fitting, key=lambda number: (rooms[number], number))
            assert packs[item] == wanted
            rooms[wanted] -= int(tokens[item])


def test_slots_are_filled_by_what_they_miss_and_hold() -> None:
    tokens, work = np.array([6, 5, 4, 3]), np.array([6.0, 5.0, 4.0, 3.0])
    room, missing = np.array([[8, 8], [9, 2]]), np.array([[3.0, 9.0], [-np.inf, 5.0]])
    # the first owner: 6 to slot 1, which then misses 3 and has room for 2, so 5 goes to slot 0; 3 fits there too
    assert fill_slots(tokens[[0, 1, 3]], work[[0, 1, 3]], np.zeros(3, dtype=np.int64), room, missing).tolist() == [
        1,
        0,
        0,
    ]
    # the second owner: slot 0 is closed, slot 1 is too small
    assert fill_slots(tokens, work, np.ones(4, dtype=np.int64), room, missing).tolist() == [-1] * 4
    assert room.tolist() == [[8, 8], [9, 2]]
    assert fill_slots(tokens[:0], work[:0], tokens[:0], room, missing).tolist() == []


def filled_slowly(
    tokens: list[int],
    work: list[float],
    owners: list[int],
    room: npt.NDArray[np.int64],
    missing: npt.NDArray[np.float64],
) -> list[int]:
    """Fill slots item by item."""
    room, missing = room.copy(), missing.copy()
    slots = []
    for size, seconds, owner in zip(tokens, work, owners, strict=True):
        lacking = np.where(room[owner] >= size, missing[owner], -np.inf)
        slot = int(lacking.argmax())
        if lacking[slot] == -np.inf:
            slots.append(-1)
            continue
        slots.append(slot)
        room[owner, slot] -= size
        missing[owner, slot] -= seconds
    return slots


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2)), max_size=40), st.integers(0, 1000))
def test_slots_of_all_owners_are_filled_as_item_by_item(items: list[tuple[int, int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens, owners = [size for size, _ in items], [owner for _, owner in items]
    work = random.uniform(0.5, 5.0, len(items))
    room, missing = random.integers(0, 25, (3, 4)), random.uniform(1.0, 9.0, (3, 4))
    missing[random.random((3, 4)) < 0.2] = -np.inf
    sizes, of_items = np.array(tokens, dtype=np.int64), np.array(owners, dtype=np.int64)
    found = fill_slots(sizes, work, of_items, room, missing)
    assert found.tolist() == filled_slowly(tokens, work.tolist(), owners, room, missing)
