"""The memory of pages: planes in one block, aligned, apart from each other."""

from __future__ import annotations

import torch

from bytescale_ext.activation.arena import ALIGNMENT
from bytescale_ext.states.pages import MOMENTS, PageMemory
from tests.plan.states.tables import TABLE, TENSORS


def test_planes_and_buffers_do_not_overlap() -> None:
    memory = PageMemory(TABLE, pinned=False)
    parts = [*memory.moments.values(), memory.copies, *memory.gradients, *memory.values]
    length = TABLE.page_elements
    assert [part.numel() for part in parts] == [7 * length, 7 * length, 6 * length, *[length] * 4]
    assert all(part.data_ptr() % ALIGNMENT == memory.arena.memory.data_ptr() % ALIGNMENT for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert all(torch.all(part == number + 1) for number, part in enumerate(parts))
    assert memory.arena.num_bytes < TABLE.host_bytes + len(parts) * 2 * ALIGNMENT


def test_tensors_and_pages_are_views_of_the_same_elements() -> None:
    memory = PageMemory(TABLE, pinned=False)
    plane = memory.moments[MOMENTS[0]]
    assert not plane.any()
    for number, tensor in enumerate(TENSORS):
        view = memory.of_tensor(plane, number, torch.Size([1, tensor.num_elements]))
        assert view.shape == (1, tensor.num_elements)
        view.fill_(number + 1)
    for number, page in enumerate(TABLE.pages):
        found = [int(value) for value in memory.of_page(plane, number)]
        assert found == [span.tensor + 1 for span in page.spans for _ in range(span.num_elements)]
