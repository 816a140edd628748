"""Page tables: tensors end to end, groups apart, short tensors first."""

from __future__ import annotations

import pytest

from bytescale_ext.plan.states.check import check_pages
from bytescale_ext.plan.states.pages import Page, PagePart, lay_out
from tests.plan.states.tables import PAGE_BYTES, TABLE, TENSORS, random_table
from tests.sample import seeds


def test_a_table_by_hand() -> None:
    """Short tensors b and f come first. c is in another group, and e has no copy."""
    b, f = PagePart(1, 0, 0, 3), PagePart(5, 0, 3, 2)
    assert TABLE.pages == (
        Page(0, True, (b, f, PagePart(0, 0, 5, 3))),
        Page(0, True, (PagePart(0, 3, 0, 8),)),
        Page(0, True, (PagePart(0, 11, 0, 8),)),
        Page(0, True, (PagePart(3, 0, 0, 8),)),
        Page(0, True, (PagePart(3, 8, 0, 1),)),
        Page(1, True, (PagePart(2, 0, 0, 3),)),
        Page(0, False, (PagePart(4, 0, 0, 8),)),
    )
    assert TABLE.starts == (5, 0, 40, 24, 48, 3)
    assert [page.num_elements for page in TABLE.pages] == [8, 8, 8, 8, 1, 3, 8]


def test_host_memory_is_that_of_planes_and_buffers() -> None:
    moments, copies, buffers = 2 * 7, 6, 4
    assert TABLE.num_copies == copies
    assert TABLE.num_host_pages == moments + copies
    assert TABLE.host_bytes == (moments + copies + buffers) * PAGE_BYTES
    assert lay_out((), PAGE_BYTES).host_bytes == 0


@pytest.mark.parametrize("seed", seeds(25))
def test_random_tables_keep_the_laws(seed: int) -> None:
    table = random_table(seed)
    check_pages(table)
    waste = table.page_elements * len(table.pages) - sum(tensor.num_elements for tensor in table.tensors)
    groups = len({(tensor.group, tensor.has_copy) for tensor in table.tensors})
    assert 0 <= waste < groups * table.page_elements


def test_the_printed_table() -> None:
    lines = TABLE.described().splitlines()
    assert lines[0] == "7 pages of 32 bytes, 768 bytes of host memory"
    assert lines[2].split() == ["0", "0", "3", "8", "b[0:3],", "f[0:2],", "a[0:3]"]
    assert lines[-1].split() == ["6", "0", "2", "8", "e[0:8]"]


@pytest.mark.parametrize("page_bytes", [0, -4, 2, 6])
def test_a_page_holds_whole_elements(page_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"a page of {page_bytes} bytes is not a multiple of 4 bytes"):
        lay_out(TENSORS, page_bytes)
