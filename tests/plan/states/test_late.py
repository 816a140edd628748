"""Bytes of the buffers of late updates."""

from __future__ import annotations

import pytest

from bytescale_ext.plan.states.late import late_bytes, result_bytes


@pytest.mark.parametrize(("update_steps", "num_sums"), [(1, 1), (2, 2), (5, 2)])
def test_a_16_bit_parameter_takes_4_bytes_of_each_sum_and_2_of_results(update_steps: int, num_sums: int) -> None:
    elements = 10 * 1024
    taken = late_bytes(num_pages=10, num_copies=10, page_bytes=4096, update_steps=update_steps)
    assert taken == elements * (4 * num_sums + 2)


def test_float32_parameters_are_as_large_as_their_pages() -> None:
    assert result_bytes(num_pages=10, num_copies=0, page_bytes=4096) == 10 * 4096
    assert result_bytes(num_pages=10, num_copies=4, page_bytes=4096) == 4 * 2048 + 6 * 4096
    assert late_bytes(10, 0, 4096, 1) == 2 * 10 * 4096
