"""Number of GPUs that share a link, by their speeds, and processes that copy at the same time."""

from __future__ import annotations

import pytest

from scripts.bench.activation import shared_link
from scripts.bench.activation.shared_link import SharedLink, copy_speeds, measure_shared_link


@pytest.mark.parametrize(
    ("together", "expected"),
    [
        ((54.0, 50.0), 1),
        ((27.0, 28.0), 2),
        ((54.0, 14.0), 4),
        ((36.0, 40.0), 2),
        ((5.0, 5.0), 8),
        ((60.0, 70.0), 1),
    ],
)
def test_the_way_that_suffers_more_decides(together: tuple[float, float], expected: int) -> None:
    assert SharedLink(8, (55.0, 52.0), together).gpus_per_link == expected


def test_one_process_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single speed is measured once. The slowest of several speeds counts."""
    calls: list[int] = []

    def speeds(num_processes: int, *_: object) -> list[tuple[float, float]]:
        calls.append(num_processes)
        return [(40.0 / num_processes, 30.0 + rank) for rank in range(num_processes)]

    monkeypatch.setattr(shared_link, "copy_speeds", speeds)
    assert measure_shared_link(1, 8, 1, False) == SharedLink(1, (40.0, 30.0), (40.0, 30.0))
    assert calls == [1]
    found = measure_shared_link(4, 8, 1, False)
    assert found == SharedLink(4, (40.0, 30.0), (10.0, 30.0))
    assert found.gpus_per_link == 4
    assert calls == [1, 1, 4]


@pytest.mark.full
@pytest.mark.ranks
def test_processes_copy_at_once() -> None:
    speeds = copy_speeds(2, 1 << 12, 2, on_cuda=False)
    assert len(speeds) == 2
    assert all(speed > 0 for pair in speeds for speed in pair)


@pytest.mark.full
@pytest.mark.ranks
def test_a_process_that_dies_is_reported() -> None:
    """A negative size fails in each process."""
    with pytest.raises(RuntimeError, match="did not finish"):
        copy_speeds(2, -1, 1, on_cuda=False)
