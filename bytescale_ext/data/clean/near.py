"""Near-duplicates across all sources: MinHash candidates from datatrove, verified by their exact Jaccard similarity."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

from bytescale_ext.data.clean.duplicates import candidate_pairs, chained_groups, dropping_pairs
from bytescale_ext.data.clean.equal import COPIES, DROPPED, copies_paths, dropped_paths
from bytescale_ext.data.clean.recipe import Recipe
from bytescale_ext.data.clean.shelf import StoredDocuments, offsets_of, shelved
from bytescale_ext.data.clean.words import RULES, jaccard, shingles
from bytescale_ext.data.tasks.runs import joined, mapped, rows_between, save_array, sorted_by
from bytescale_ext.new_file import new_file

# Documents of a pair, by their numbers over all tasks. The better document stays if the two are duplicates.
PAIR: Final = np.dtype([("worse", "<u8"), ("better", "<u8")])
# A verified pair: also its similarity, the number of texts equal to the worse document, and what ranks both documents.
VERIFIED: Final = np.dtype(
    [
        *((name, "<u8") for name in ("worse", "better", "copies", "worse_hash", "better_hash")),
        *((name, "<i8") for name in ("worse_size", "better_size")),
        ("jaccard", "<f8"),
    ]
)
# A dropped document and the document that stays for it.
NEAR: Final = np.dtype([("worse", "<u8"), ("better", "<u8"), ("copies", "<u8"), ("jaccard", "<f8")])
_ORDER: Final = ("worse_size", "worse_hash", "worse", "better_size", "better_hash", "better")
_PAIRS: Final = 1 << 21  # pairs of a run
_LINKS: Final = 1 << 19  # links of buckets that are read together
_ENTRY_BYTES: Final = 200  # of a document in the cache of shingles, apart from its shingles
_DECIDE_BYTES: Final = 400  # of a verified pair while it is decided
_SAMPLES: Final = 64  # samples of a block of verified pairs
_BLOCK: Final = 512  # shingles that are hashed together, to limit the memory for long documents
_ODD: Final = np.uint64(1)
_UNUSED_BITS: Final = np.uint64(3)  # datatrove ignores signatures of 2^61 and more
_LARGEST: Final = np.uint64((1 << 64) - 1)


def minhash_config(recipe: Recipe) -> MinhashConfig:
    """Return datatrove's settings, with 64-bit hashes because 32-bit hashes would collide in large corpora."""
    return MinhashConfig(
        n_grams=recipe.ngram,
        num_buckets=recipe.buckets,
        hashes_per_bucket=recipe.hashes,
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )


class Signatures(MinhashDedupSignature):  # type: ignore[misc]  # datatrove has no types
    """datatrove's signature step, with our shingles and a limited use of memory."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(str(folder), config=minhash_config(recipe), language=RULES)

    def get_shingles(self, text: str) -> np.ndarray:
        """Return the hashes of the distinct shingles: uint64 [n, 1]."""
        return shingles(text, self.config.n_grams).reshape(-1, 1)

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """Return the smallest hash under each permutation, grouped by bucket. ``shingles``: uint64 [n, 1].

        Multiplying by an odd factor and adding a constant permutes the 64-bit numbers, which wrap. This is faster than
        datatrove's arithmetic modulo a prime.
        """
        a, b = self.parameters
        least = np.full(self.num_hashes, _LARGEST)
        buffer = np.empty((_BLOCK, self.num_hashes), np.uint64)
        for start in range(0, len(shingles), _BLOCK):
            block = shingles[start : start + _BLOCK]
            permuted = np.multiply(block, a | _ODD, out=buffer[: len(block)])
            permuted += b
            np.minimum(least, permuted.min(axis=0), out=least)
        return [bucket.tolist() for bucket in np.split(least >> _UNUSED_BITS, self.config.num_buckets)]


def verified_path(work: Path, task: int) -> Path:
    """Return the path of the verified pairs of a task's documents."""
    return work / "verified" / f"{task:05d}.npy"


class Unequal(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Yields all documents of a task. Those that are dropped for an equal text have no text, so they match nothing."""

    name = "unequal"
    type = "reader"

    def __init__(self, work: Path) -> None:
        super().__init__()
        self.work = work

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Read the stored documents of task ``rank``."""
        begin, end = offsets_of(self.work, world_size)[rank : rank + 2].tolist()
        dropped = joined(rows_between(dropped_paths(self.work, world_size), "number", begin, end), DROPPED)
        is_dropped = np.zeros(end - begin, bool)
        is_dropped[(dropped["number"] - np.uint64(begin)).astype(np.int64)] = True
        for number, values in shelved(self.work, rank):
            yield Document("" if is_dropped[number] else str(values["text"]), str(number))


class Pairs(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Writes the pairs of documents that share a bucket in runs of limited length, sorted by the worse document.

    The longer of two documents is better; of equally long documents the smaller hash of the text.
    """

    name = "pairs"
    type = "dedup"

    def __init__(self, work: Path, tasks: int) -> None:
        super().__init__()
        self.work = work
        self.tasks = tasks

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Read the matches of bucket ``rank``."""
        documents = StoredDocuments(self.work, self.tasks)
        parts: list[np.ndarray] = []
        count = number = 0
        for links in self._links(documents.offsets, rank):
            members = np.unique(links)
            rows = documents.rows(members)
            places = np.empty(len(members), np.int64)
            places[np.lexsort((members, rows["high"], -rows["length"].astype(np.int64)))] = np.arange(len(members))
            for group in chained_groups(links):
                group = np.unique(group)
                parts.append(candidate_pairs(group[np.argsort(places[np.searchsorted(members, group)])]))
                count += len(parts[-1])
                if count >= _PAIRS:
                    self._save(parts, rank, number)
                    parts, count, number = [], 0, number + 1
        self._save(parts, rank, number)

    def _links(self, offsets: np.ndarray, bucket: int) -> Iterator[np.ndarray]:
        """Yield links of documents that share a bucket, int64 [n, 2]; a chain of links is in one block."""
        path = self.work / "matches" / f"{bucket:05d}_00.dups"
        size = path.stat().st_size // 16 if path.exists() else 0
        links = np.memmap(path, "<u4", "r", shape=(size, 4)) if size else np.empty((0, 4), np.uint32)
        begin = 0
        while begin < size:
            end = min(begin + _LINKS, size)
            while end < size and links[end, :2].tolist() == links[end - 1, 2:].tolist():
                end += 1
            block = links[begin:end].astype(np.int64)
            yield np.stack([offsets[block[:, i]] + block[:, i + 1] for i in (0, 2)], axis=1)
            begin = end

    def _save(self, parts: list[np.ndarray], bucket: int, number: int) -> None:
        pairs = np.unique(np.concatenate([np.empty((0, 2), np.int64), *parts]), axis=0)
        run = np.empty(len(pairs), PAIR)
        run["worse"], run["better"] = pairs.T
        save_array(self.work / "pairs" / f"{bucket:05d}-{number:05d}.npy", run)


class Verify(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Computes the similarity of pairs on all their shingles. A task verifies the pairs of its worse documents."""

    name = "verify"
    type = "dedup"

    def __init__(self, recipe: Recipe, work: Path, memory_gb: float) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work
        self.cache_bytes = int(memory_gb * 1e9 / 2)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the pairs that are similar enough."""
        documents = StoredDocuments(self.work, world_size)
        begin, end = documents.offsets[rank : rank + 2].tolist()
        runs = sorted((self.work / "pairs").glob("*.npy"))
        pairs = np.unique(joined(rows_between(runs, "worse", begin, end), PAIR))
        cache = _Shingles(documents, self.recipe.ngram, self.cache_bytes)
        similarity = [jaccard(cache.of(a), cache.of(b)) for a, b in pairs.tolist()]
        verified = np.empty(len(pairs), VERIFIED)
        verified["worse"], verified["better"], verified["jaccard"] = pairs["worse"], pairs["better"], similarity
        verified = verified[verified["jaccard"] >= self.recipe.jaccard]
        for side in ("worse", "better"):
            rows = documents.rows(verified[side].astype(np.int64))
            verified[f"{side}_size"], verified[f"{side}_hash"] = -rows["length"].astype(np.int64), rows["high"]
        copies = joined(rows_between(copies_paths(self.work, world_size), "number", begin, end), COPIES)
        verified["copies"] = values_at(copies, "number", "copies", verified["worse"], 1)
        save_array(verified_path(self.work, rank), sorted_by(verified, _ORDER))


class _Shingles:
    """Shingles of documents; the least recently used are forgotten."""

    def __init__(self, documents: StoredDocuments, ngram: int, most_bytes: int) -> None:
        self._documents = documents
        self._ngram = ngram
        self._room = most_bytes
        self._known: OrderedDict[int, np.ndarray] = OrderedDict()

    def of(self, number: int) -> np.ndarray:
        """Return the shingles of a document: uint64 [n], sorted."""
        if number in self._known:
            self._known.move_to_end(number)
            return self._known[number]
        found = shingles(str(self._documents.read(number)["text"]), self._ngram)
        self._known[number] = found
        self._room -= found.nbytes + _ENTRY_BYTES
        while self._room < 0 and len(self._known) > 2:
            self._room += self._known.popitem(last=False)[1].nbytes + _ENTRY_BYTES
        return found


def values_at(records: np.ndarray, key: str, field: str, keys: np.ndarray, default: int) -> np.ndarray:
    """Return the field of the records with these keys, [n], or the default: int64 [n].

    Args:
        records: records [m] with unique keys.
        key: field of the keys.
        field: field of the values.
        keys: keys to look up, [n].
        default: value of an unknown key.
    """
    records = records[np.argsort(records[key])]
    values = np.full(len(keys), default, np.int64)
    if len(records):
        places = np.minimum(np.searchsorted(records[key], keys), len(records) - 1)
        is_known = records[key][places] == keys
        values[is_known] = records[field][places[is_known]]
    return values


class Decide(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Decides in one task which near-duplicates are dropped, from verified pairs in blocks of limited length."""

    name = "decide"
    type = "dedup"

    def __init__(self, work: Path, tasks: int, memory_gb: float) -> None:
        super().__init__()
        self.work = work
        self.tasks = tasks
        self.block = max(int(memory_gb * 1e9 / 2 / _DECIDE_BYTES), 1)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the runs of dropped documents, sorted by the dropped and sorted by the kept document."""
        runs = [mapped(verified_path(self.work, task)) for task in range(self.tasks)]
        is_dropped = self._nothing_dropped()
        for number, verified in enumerate(self._blocks(runs)):
            worse, better = (verified[side].astype(np.int64) for side in ("worse", "better"))
            chosen = verified[dropping_pairs(worse, better, is_dropped[better])]
            is_dropped[chosen["worse"].astype(np.int64)] = True
            near = np.empty(len(chosen), NEAR)
            for name in NEAR.names or ():
                near[name] = chosen[name]
            for side in ("worse", "better"):
                save_array(self.work / "near" / side / f"{number:05d}.npy", near[np.argsort(near[side], kind="stable")])

    def _nothing_dropped(self) -> np.ndarray:
        """Return a file of False for each document, mapped into memory: bool [documents]."""
        path = self.work / "near" / "dropped"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        documents = int(offsets_of(self.work, self.tasks)[-1])
        with new_file(path, is_binary=True) as stream:
            stream.truncate(max(documents, 1))
        return np.memmap(path, bool, "r+")

    def _blocks(self, runs: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the verified pairs, ``VERIFIED`` [n], by rank. All pairs of a worse document are in one block."""
        size = sum(map(len, runs))
        step = max(self.block // _SAMPLES, 1)
        limits: list[tuple[int, ...]] = []
        if size > self.block:
            samples = sorted(_rank(row) for run in runs for row in run[::step])
            limits = sorted(set(samples[_SAMPLES::_SAMPLES]))
        begins = [0] * len(runs)
        for limit in [*limits, None]:
            ends = [len(run) if limit is None else bisect_left(run, limit, key=_rank) for run in runs]
            parts = [np.array(run[begin:end]) for run, begin, end in zip(runs, begins, ends, strict=True)]
            yield sorted_by(joined(parts, VERIFIED), _ORDER)
            begins = ends


def _rank(row: np.void) -> tuple[int, ...]:
    """Return the rank of the worse document of a pair."""
    return tuple(int(row[name]) for name in _ORDER[:3])
