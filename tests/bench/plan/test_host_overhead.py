"""The benchmark of our own Python in a step: what it counts, on a small step."""

from __future__ import annotations

import pytest

from scripts.bench.plan import host_overhead
from scripts.bench.plan.host_overhead import Overhead, documents_of, measured, table
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def measure(rank: int, world: int) -> list[Overhead]:
    return measured([24, 48], [1, 4], num_steps=1)


def test_each_case_is_measured_on_the_rank_with_most_documents() -> None:
    rows = run_ranks(measure, 1, init_group=False)[0]
    assert [(row.documents, row.ranks) for row in rows] == [(24, 1), (24, 4), (48, 1), (48, 4)]
    for row in rows:
        assert row.documents / row.ranks <= row.rank_documents <= row.documents
        assert 1 <= row.micro_batches <= row.rank_documents
        assert row.step >= 0
        assert min(row.micro_batch, row.plan, row.read) > 0
    assert rows[0].rank_documents == 24


def test_documents_and_the_table() -> None:
    lengths = documents_of(300, 1024, 0)
    assert len(lengths) == 300
    assert max(lengths) <= 1024
    assert lengths != documents_of(300, 1024, 1)
    text = table([Overhead(15_000, 8, 10, 2_334, 0.0015, 0.0003, 0.1, 0.6)])
    assert text.splitlines()[1].split() == ["15,000", "8", "2,334", "10", "1.500", "0.300", "100.000", "600.000"]
    assert host_overhead.LONGEST % host_overhead.TOKENS_PER_RANK == 0
