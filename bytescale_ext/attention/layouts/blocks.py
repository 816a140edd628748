"""Blocks: packed documents of queries against packed documents of keys.

An ``AttentionBlock`` is what one kernel call computes. A ``PlacedBlock`` also says which rows of a rank's tensors hold
the queries and the keys; layouts are made of these. Documents never attend to each other, so no masks are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows

Interval = tuple[int, int]  # rows [start, stop)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Which keys each query of a kernel call sees, and the factor of the scores.

    Document i is the rows ``[cu_q.offsets[i], cu_q.offsets[i + 1])`` of the queries and the same interval of ``cu_k``
    of the keys.

    Attributes:
        cu_q: offsets of the documents in the queries.
        cu_k: offsets of the documents in the keys, equally many.
        causal: a query sees the keys of its document up to its own position, which needs equal offsets; otherwise
            it sees all keys of its document.
        scale: factor of the scores, usually ``dim ** -0.5``.

    Raises:
        ValueError: the offsets do not fit each other.
    """

    cu_q: CuSeqlens
    cu_k: CuSeqlens
    causal: bool
    scale: float

    def __post_init__(self) -> None:
        num_q, num_k = self.cu_q.num_documents, self.cu_k.num_documents
        if num_q != num_k:
            raise ValueError(f"a block needs as many documents of keys as of queries, got {num_q} and {num_k}")
        if self.causal and self.cu_q != self.cu_k:
            raise ValueError(
                f"a causal block needs equal offsets of queries and keys, got {self.cu_q.offsets} and "
                f"{self.cu_k.offsets}"
            )

    @property
    def num_documents(self) -> int:
        return self.cu_q.num_documents

    def documents(self) -> Iterator[tuple[slice, slice]]:
        """Yield the query rows and the key rows of each document that has both."""
        for rows, keys in zip(pairwise(self.cu_q.offsets), pairwise(self.cu_k.offsets), strict=True):
            if rows[0] < rows[1] and keys[0] < keys[1]:
                yield slice(*rows), slice(*keys)


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block and the rows of its queries and keys. Documents without queries or without keys are left out.

    Attributes:
        queries: rows in my queries.
        keys: rows in the keys of one rank.
        causal: as in ``AttentionBlock``.
        cu_q: offsets of the documents in ``queries``.
        cu_k: offsets of the documents in ``keys``.
        source: in a ring, the index of the member that holds the keys; otherwise 0.
    """

    queries: Rows
    keys: Rows
    causal: bool
    cu_q: CuSeqlens
    cu_k: CuSeqlens
    source: int = 0

    @classmethod
    def of(
        cls, queries: Sequence[Interval], keys: Sequence[Interval], causal: bool = False, source: int = 0
    ) -> PlacedBlock:
        """Return the block of these intervals, one of queries and one of keys for each document."""
        documents = [(q, k) for q, k in zip(queries, keys, strict=True) if q[0] < q[1] and k[0] < k[1]]
        return cls(
            queries=Rows.of(q for q, _ in documents),
            keys=Rows.of(k for _, k in documents),
            causal=causal,
            cu_q=CuSeqlens.of_lengths([stop - start for (start, stop), _ in documents]),
            cu_k=CuSeqlens.of_lengths([stop - start for _, (start, stop) in documents]),
            source=source,
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.cu_q.num_documents == 0

    def attention(self, scale: float) -> AttentionBlock:
        """Return what a kernel computes for this block."""
        return AttentionBlock(self.cu_q, self.cu_k, self.causal, scale)


def share_values(blocks: Sequence[PlacedBlock]) -> tuple[PlacedBlock, ...]:
    """Return the same blocks with equal rows and offsets as one object, which is copied to a device once."""
    rows: dict[Rows, Rows] = {}
    offsets: dict[CuSeqlens, CuSeqlens] = {}
    return tuple(
        replace(
            block,
            queries=rows.setdefault(block.queries, block.queries),
            keys=rows.setdefault(block.keys, block.keys),
            cu_q=offsets.setdefault(block.cu_q, block.cu_q),
            cu_k=offsets.setdefault(block.cu_k, block.cu_k),
        )
        for block in blocks
    )
