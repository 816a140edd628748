"""Blocks: packed documents of queries against packed documents of keys.

An ``AttentionBlock`` is the input of one kernel call. A ``PlacedBlock`` also has the rows of the queries and keys in a
rank's tensors; layouts consist of placed blocks. Documents never attend to each other, so no masks are needed. With a
window (``layouts/window.py``) the last query of each document has the position of its last key::

    keys       0 1 2 3 4 5
    query of 3     x x x           window 2: a query sees its own key and the two before it
    query of 4       x x x
    query of 5         x x x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows

Interval = tuple[int, int]  # rows [start, stop)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """The documents of a kernel call, the keys that their queries see, and the factor of the scores.

    Document i has the query rows ``[cu_q.offsets[i], cu_q.offsets[i + 1])`` and the key rows
    ``[cu_k.offsets[i], cu_k.offsets[i + 1])``.

    Attributes:
        cu_q: offsets of the documents in the queries.
        cu_k: offsets of the documents in the keys, as many as in ``cu_q``.
        causal: whether a query sees the keys of its document up to its own position, instead of all keys of its
            document. Causal blocks need equal offsets or a window.
        scale: factor of the scores, usually ``dim ** -0.5``.
        window: the most keys before its own key that a query of a causal block sees, at least 1; None for all. With a
            window, a document may have additional keys before its first query.

    Raises:
        ValueError: the offsets do not fit each other.
    """

    cu_q: CuSeqlens
    cu_k: CuSeqlens
    causal: bool
    scale: float
    window: int | None = None

    def __post_init__(self) -> None:
        num_q, num_k = self.cu_q.num_documents, self.cu_k.num_documents
        if num_q != num_k:
            raise ValueError(f"a block needs as many documents of keys as of queries, got {num_q} and {num_k}")
        if self.window is not None:
            lengths = zip(self.cu_q.lengths, self.cu_k.lengths, strict=True)
            if not self.causal or self.window < 1 or any(k < q for q, k in lengths):
                raise ValueError(f"a window needs a causal block with at least as many keys as queries: {self}")
        elif self.causal and self.cu_q != self.cu_k:
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

    def seen_keys(self, rows: slice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first key that each query in ``rows`` sees, and the key after the last: int32 ``[rows]`` each.

        Neither descends from row to row. Does not wait for the device.
        """
        cu_q, cu_k = self.cu_q.on(device), self.cu_k.on(device)
        row = torch.arange(rows.start, rows.stop, dtype=cu_q.dtype, device=device)
        document = torch.bucketize(row, cu_q[1:], right=True)
        first, stop = cu_k[document], cu_k[document + 1]
        if self.causal:
            stop = stop - (cu_q[document + 1] - row - 1)  # the last query has the position of the last key
            first = first if self.window is None else torch.maximum(first, stop - 1 - self.window)
        return first, stop

    def tiles(self, num_queries: int) -> Iterator[Tile]:
        """Yield the documents of a block with a window in tiles of at most ``num_queries`` queries.

        The tiles have at most ``(window + num_queries) / window`` times the work of the block.
        """
        assert self.window is not None, f"{self=}"
        for rows, keys in self.documents():
            before = (keys.stop - keys.start) - (rows.stop - rows.start)  # keys before the first query
            for start in range(rows.start, rows.stop, num_queries):
                stop = min(start + num_queries, rows.stop)
                first, last = (keys.start + before + row - rows.start for row in (start, stop))
                first_seen = max(keys.start, first - self.window)
                yield Tile(slice(start, stop), slice(first_seen, last), self.window)


class Tile(NamedTuple):
    """Consecutive queries and the keys that they see. The last query has the position of the last key."""

    rows: slice
    keys: slice
    window: int

    def hidden(self, device: torch.device) -> torch.Tensor:
        """Return the mask of the keys that each query does not see, bool ``[queries, keys]``."""
        num_rows, num_keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        own = num_keys - num_rows  # the key of the first query
        everything = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device)
        return everything.triu(own + 1) | everything.tril(own - self.window - 1)


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block and the rows of its queries and keys, without documents that lack queries or keys.

    Attributes:
        queries: rows of the block among this rank's queries.
        keys: rows of the block among the keys of one rank.
        causal: see ``AttentionBlock``.
        cu_q: offsets of the documents in ``queries``.
        cu_k: offsets of the documents in ``keys``.
        source: index of the ring member that owns the keys; 0 without a ring.
        window: see ``AttentionBlock``.
    """

    queries: Rows
    keys: Rows
    causal: bool
    cu_q: CuSeqlens
    cu_k: CuSeqlens
    source: int = 0
    window: int | None = None
    _attention: dict[float, AttentionBlock] = field(init=False, default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, queries: Sequence[Interval], keys: Sequence[Interval], causal: bool = False, source: int = 0
    ) -> PlacedBlock:
        """Return the block of documents with the given intervals of queries and keys."""
        documents = [(q, k) for q, k in zip(queries, keys, strict=True) if q[0] < q[1] and k[0] < k[1]]
        return cls(
            queries=Rows.of(q for q, _ in documents),
            keys=Rows.of(k for _, k in documents),
            causal=causal,
            cu_q=CuSeqlens.of_lengths([stop - start for (start, stop), _ in documents]),
            cu_k=CuSeqlens.of_lengths([stop - start for _, (start, stop) in documents]),
            source=source,
        )

    @classmethod
    def in_window(cls, queries: Sequence[Interval], keys: Sequence[Interval], window: int) -> PlacedBlock:
        """Return the causal block of documents whose keys end with their queries, with ``window`` if it limits any."""
        block = cls.of(queries, keys, causal=True)
        limits = block.cu_q != block.cu_k or block.cu_k.longest > window + 1
        return replace(block, window=window) if limits else block

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.cu_q.num_documents == 0

    def attention(self, scale: float) -> AttentionBlock:
        """Return the input of the kernel call for this block, which is checked once for all layers."""
        if scale not in self._attention:
            self._attention[scale] = AttentionBlock(self.cu_q, self.cu_k, self.causal, scale, self.window)
        return self._attention[scale]


def share_values(blocks: Sequence[PlacedBlock]) -> tuple[PlacedBlock, ...]:
    """Return the blocks, with one object for equal rows or offsets, so that they are copied to a device once."""
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
