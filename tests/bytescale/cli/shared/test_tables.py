from __future__ import annotations

from megatron.bytescale.cli.shared.tables import aligned


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("", "GB", "binds"), ("static", "9.5", "memory"), ("ours", "10.25", "")]
    assert aligned(rows, left={0, 2}) == [
        "           GB  binds",
        "static    9.5  memory",
        "ours    10.25",
    ]
