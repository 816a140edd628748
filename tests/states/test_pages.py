"""Memory of pages: disjoint, aligned planes in one block."""

from __future__ import annotations

import torch

from bytescale_ext.activation.arena import ALIGNMENT
from bytescale_ext.states.pages import PageMemory
from tests.plan.states.tables import TABLE, TENSORS


def test_planes_and_buffers_do_not_overlap() -> None:
    memory = PageMemory(TABLE, pinned=False)
    parts = [*memory.planes, *memory.gradients, *memory.values]
    length = TABLE.page_elements
    assert [part.numel() for part in parts] == [7 * length, 7 * length, 6 * length, *[length] * 4]
    assert all(part.data_ptr() % ALIGNMENT == memory.arena.memory.data_ptr() % ALIGNMENT for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert all(torch.all(part == number + 1) for number, part in enumerate(parts))
    assert memory.arena.num_bytes < TABLE.host_bytes + len(parts) * 2 * ALIGNMENT


def test_tensors_and_pages_are_views_of_the_same_elements() -> None:
    memory = PageMemory(TABLE, pinned=False)
    assert not memory.planes[1].any()
    for number, tensor in enumerate(TENSORS):
        view = memory.tensor_view(1, number, torch.Size([1, tensor.num_elements]))
        assert view.shape == (1, tensor.num_elements)
        view.fill_(number + 1)
    for number, page in enumerate(TABLE.pages):
        states = memory.page_views(number)
        assert len(states) == 2 + page.has_copy
        found = [int(value) for value in states[1]]
        assert found == [part.tensor + 1 for part in page.parts for _ in range(part.num_elements)]


def test_pages_that_lie_elsewhere_take_no_memory() -> None:
    memory = PageMemory(TABLE, pinned=False, excluded={0, 3, 6})
    length = TABLE.page_elements
    assert [plane.numel() for plane in memory.planes] == [4 * length, 4 * length, 4 * length]
    assert memory.places == {1: 0, 2: 1, 4: 2, 5: 3}
    for number in memory.places:
        memory.whole_page(0, number).fill_(number)
    assert [int(page[0]) for page in memory.planes[0].view(4, -1)] == [1, 2, 4, 5]
    assert [len(part) for part in memory.page_views(5)] == [TABLE.pages[5].num_elements] * 3
