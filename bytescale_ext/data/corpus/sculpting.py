"""Windows of related documents of a data set, in stages whose tasks need memory for a part of the corpus only.

1. ``Fit`` fits the embedding and the centres of partitions to a sample of documents.
2. ``Embed`` embeds shards of documents, and sorts the pieces of each shard by their partition.
3. ``FillWindows`` makes the windows of one partition at a time.
4. ``Join`` joins the windows of all partitions.

The bounds of shards and partitions depend only on the corpus, so the windows are the same for any number of tasks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.data.corpus.embed import (
    FITTED,
    MODEL,
    WordSpace,
    by_model,
    check_text,
    counts_of,
    embed,
    fit_space,
    load_space,
    vectors_of,
)
from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.data.corpus.tokens import CorpusTokens, MappedTokens, map_tokens, text_of
from bytescale_ext.data.corpus.windows_file import ORDERS, WindowsHeader, save_windows, sha256_of
from bytescale_ext.data.samples.lengths import SampleTable, read_idx_lengths, sample_table
from bytescale_ext.data.samples.texts import BYTE_LEVEL_EOD
from bytescale_ext.data.tasks.runs import mapped, new_mapped, save_array
from bytescale_ext.data.tasks.stages import Stage, Step
from bytescale_ext.json_input import json_settings
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.partitions import partition_centres
from bytescale_ext.plan.sculpt.pieces import ROW, Pieces, Table, related_order
from bytescale_ext.plan.sculpt.quality import QualitySums, quality_sums
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt

# A piece of a document, and the partition that it belongs to.
PIECE: Final = np.dtype([("document", "<i8"), ("start", "<i8"), ("length", "<i8"), ("partition", "<i8")])
REPORT: Final = "report.json"
_PARTITION_PIECES: Final = 1 << 12
_MOST_PARTITIONS: Final = 1 << 16  # the sample for their centres is in memory
_PARTITION_WINDOWS: Final = 64  # least windows of a partition: its last windows are not full
_SAMPLES: Final = 32  # sampled documents of a partition
_SAMPLE_TOKENS: Final = 1 << 28
_SHARD_TOKENS: Final = 1 << 26
_SHARD_DOCUMENTS: Final = 1 << 16
_WHOLE_CHECK: Final = 1 << 23  # pieces up to which all windows are checked together


@dataclass(frozen=True)
class SculptJob:
    """Windows to make.

    Attributes:
        prefix: data set.
        settings: settings of the windows.
        embedder: None for the default, or ``hf:PATH``.
        work: folder of the files that tasks exchange.
        output: file of the windows.
        passes: first document of each pass of a blend. No window has documents of two passes.
        order: order of the documents in a window, one of ``ORDERS``.
        partition_pieces: pieces that a partition should have. A small partition takes less time and memory, and its
            windows exchange their parts more thoroughly; but its last windows are not full.
    """

    prefix: str
    settings: SculptSettings
    embedder: str | None
    work: Path
    output: Path
    passes: tuple[int, ...] = (0,)
    order: str = ORDERS[0]
    partition_pieces: int = _PARTITION_PIECES

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # no memory maps

    @cached_property
    def corpus(self) -> MappedTokens:
        """The tokens of the data set."""
        return map_tokens(self.prefix)

    @property
    def num_documents(self) -> int:
        """Number of documents of the data set."""
        return self.corpus.index.num_documents

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a document."""
        return len(self.corpus.tokens) / self.num_documents

    @property
    def shard_documents(self) -> int:
        """Number of documents of a shard, which all shards except the last have."""
        return int(min(max(_SHARD_TOKENS / self.mean_tokens, 1), _SHARD_DOCUMENTS))

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.num_documents // self.shard_documents)

    @property
    def num_partitions(self) -> int:
        """Number of partitions of all passes. ``Fit`` decides the partitions of a pass."""
        return len(mapped(self.work / "centres.npy")) * len(self.passes)

    def pieces_path(self, shard: int) -> Path:
        """Return the path of the pieces of a shard, sorted by partition: ``PIECE`` [n]."""
        return self.work / "shards" / f"{shard:05d}.pieces.npy"

    def vectors_path(self, shard: int) -> Path:
        """Return the path of the vectors of these pieces: float32 [n, d]."""
        return self.work / "shards" / f"{shard:05d}.vectors.npy"

    def bounds_path(self, shard: int) -> Path:
        """Return the path of the first piece of each partition in a shard: int64 [partitions + 1]."""
        return self.work / "shards" / f"{shard:05d}.bounds.npy"

    def partition_path(self, partition: int, content: str) -> Path:
        """Return the path of a partition's windows (rows.npy), clusters of pieces (clusters.npy) or figures (json)."""
        return self.work / "partitions" / f"{partition:07d}.{content}"

    def vectors(self, table: SampleTable, space: WordSpace | None, is_bytes: bool) -> np.ndarray:
        """Return the unit vectors of pieces, float32 [pieces, d]; ``space`` is the space of the default embedder."""
        pieces = self.corpus.pieces(table)
        if space is None:
            return by_model(str(self.embedder).removeprefix(MODEL), map(text_of, pieces))
        return vectors_of(counts_of(pieces, is_bytes), space)

    def key(self) -> str:
        """Return a text that identifies the windows."""
        settings = dataclasses.asdict(self.settings)
        more = [self.embedder, self.passes, self.order, self.partition_pieces]
        return json.dumps([sha256_of(self.prefix + ".idx"), settings, *more])


@dataclass(frozen=True)
class Fit:
    """Step that fits the embedding and the centres of partitions to a sample of documents."""

    job: SculptJob

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the space, the centres, and whether tokens are bytes."""
        job, context = self.job, self.job.settings.context
        few = int(min(FITTED, max(_SAMPLE_TOKENS / job.mean_tokens, FITTED // 10)))
        num_partitions = min(job.num_documents // job.partition_pieces, _MOST_PARTITIONS)
        sample = self._sample(max(few, _SAMPLES * num_partitions))
        fitted = job.corpus.table(np.sort(sample[:few]), context)
        is_bytes = all(int(ids.max()) <= BYTE_LEVEL_EOD for ids in job.corpus.pieces(fitted))
        check_text(job.embedder, job.prefix, is_bytes)
        space = None
        if job.embedder is None:
            space = fit_space(counts_of(job.corpus.pieces(fitted), is_bytes), job.settings.seed)
            space.save(job.work / "space.npz")
        centres = np.zeros((1, 1), np.float32)
        mean_length = job.mean_tokens * len(np.unique(fitted.document)) / len(fitted)
        num_pieces = len(fitted) / len(sample[:few]) * job.num_documents
        full_windows = round(_PARTITION_WINDOWS * context / mean_length)
        largest = max(job.partition_pieces, full_windows, round(num_pieces / _MOST_PARTITIONS))
        if num_pieces > largest:
            parts = np.array_split(np.sort(sample), -(-len(sample) // FITTED))
            vectors = np.concatenate([job.vectors(job.corpus.table(part, context), space, is_bytes) for part in parts])
            share = len(sample) / job.num_documents
            centres = partition_centres(vectors, max(round(largest * share), 1), job.settings.seed)
        save_array(job.work / "centres.npy", centres)
        write_text(job.work / "fit.json", json.dumps({"is_bytes": is_bytes, "largest": 2 * largest}))

    def _sample(self, size: int) -> np.ndarray:
        """Return ``size`` random documents, or all if there are fewer: int64 [n]."""
        random, documents = np.random.RandomState(self.job.settings.seed % 2**32), self.job.num_documents
        if documents <= max(1 << 24, size):
            return random.permutation(documents)[:size].astype(np.int64)
        return random.permutation(np.unique(random.randint(0, documents, size, dtype=np.int64)))


@dataclass(frozen=True)
class Embed:
    """Step that embeds shards of documents and sorts their pieces by partition."""

    job: SculptJob

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the pieces and vectors of shards ``rank``, ``rank + world_size`` and so on."""
        job = self.job
        space = load_space(job.work / "space.npz") if job.embedder is None else None
        is_bytes = bool(json_settings((job.work / "fit.json").read_text())["is_bytes"])
        centres = mapped(job.work / "centres.npy")
        for shard in range(rank, job.num_shards, world_size):
            begin = shard * job.shard_documents
            end = min(begin + job.shard_documents, job.num_documents)
            table = job.corpus.table(np.arange(begin, end), job.settings.context)
            vectors = job.vectors(table, space, is_bytes) if len(table) else np.empty((0, 1), np.float32)
            pieces = np.empty(len(table), PIECE)
            for name in ("document", "start", "length"):
                pieces[name] = getattr(table, name)
            pieces["partition"] = nearest_centres(centres, vectors)[0] if len(centres) > 1 and len(table) else 0
            number = np.searchsorted(job.passes, pieces["document"], side="right") - 1
            pieces["partition"] += number * len(centres)
            order = np.argsort(pieces["partition"], kind="stable")
            save_array(job.vectors_path(shard), vectors[order])
            save_array(job.pieces_path(shard), pieces[order])
            bounds = np.searchsorted(pieces["partition"][order], np.arange(job.num_partitions + 1))
            save_array(job.bounds_path(shard), bounds)


@dataclass(frozen=True)
class FillWindows:
    """Step that makes the windows of partitions."""

    job: SculptJob

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the windows of partitions ``rank``, ``rank + world_size`` and so on."""
        job = self.job
        for partition in range(rank, job.num_partitions, world_size):
            self._save(partition, [self._windows(*block) for block in self.blocks(partition)])

    def blocks(self, partition: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pieces, ``PIECE`` [n], and vectors, [n, d], of a partition in blocks of limited length."""
        job = self.job
        largest = int(str(json_settings((job.work / "fit.json").read_text())["largest"]))
        bounds = [mapped(job.bounds_path(shard))[partition : partition + 2].tolist() for shard in range(job.num_shards)]
        num_blocks = -(-sum(end - begin for begin, end in bounds) // largest)
        for block in range(num_blocks):
            pieces, vectors = [], []
            for shard, (begin, end) in enumerate(bounds):
                first, last = (begin + (end - begin) * part // num_blocks for part in (block, block + 1))
                if first < last:
                    pieces.append(mapped(job.pieces_path(shard))[first:last])
                    vectors.append(mapped(job.vectors_path(shard))[first:last])
            yield np.concatenate(pieces), np.concatenate(vectors)

    def _windows(self, rows: np.ndarray, vectors: np.ndarray) -> tuple[Table, np.ndarray, dict[str, object]]:
        """Return the checked windows of pieces [n], the cluster of each piece [n], and figures of the windows."""
        settings = self.job.settings
        everything = np.arange(len(rows))
        pieces = Pieces(everything, np.zeros_like(everything), rows["length"], vectors)
        sculpted = sculpt(pieces, settings, nearest_centres)
        check_windows(sculpted.table, pieces.length, settings.context, settings.overflow)
        table, cluster = sculpted.table, sculpted.cluster
        piece = table["document"].copy()
        if self.job.order == "related":
            order = related_order(table, vectors[piece])
            table, piece = table[order], piece[order]
        table["document"], table["start"] = rows["document"][piece], rows["start"][piece] + table["start"]
        figures: dict[str, object] = {
            "sums": dataclasses.asdict(quality_sums(table, pieces, piece)),
            "clusters": np.bincount(cluster, weights=pieces.length).astype(np.int64).tolist(),
            "num_long": int(np.count_nonzero(rows["start"] == settings.context)),
        }
        return table, cluster, figures

    def _save(self, partition: int, made: list[tuple[Table, np.ndarray, dict[str, object]]]) -> None:
        rows, clusters, windows, first = [np.empty(0, ROW)], [np.empty(0, np.int64)], 0, 0
        for table, cluster, _ in made:
            table["window"] += windows
            windows = int(table["window"][-1]) + 1
            rows.append(table)
            clusters.append(cluster + first)
            first += int(cluster.max()) + 1
        save_array(self.job.partition_path(partition, "rows.npy"), np.concatenate(rows))
        save_array(self.job.partition_path(partition, "clusters.npy"), np.concatenate(clusters))
        write_text(self.job.partition_path(partition, "json"), json.dumps([figures for *_, figures in made]))


@dataclass(frozen=True)
class Join:
    """Step that joins the windows of all partitions, and writes them and the report of their quality."""

    job: SculptJob

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the files."""
        job, settings = self.job, self.job.settings
        tables = [mapped(job.partition_path(partition, "rows.npy")) for partition in range(job.num_partitions)]
        joined = new_mapped(job.work / "table.npy", ROW, sum(map(len, tables)))
        row = windows = 0
        for table in tables:
            part = joined[row : row + len(table)]
            part[:] = table
            part["window"] += windows
            row += len(table)
            windows = int(part["window"][-1]) + 1 if len(table) else windows
        if len(joined) <= _WHOLE_CHECK:
            check_windows(joined, read_idx_lengths(job.prefix), settings.context, settings.overflow)
        digest = sha256_of(job.prefix + ".idx")
        header = WindowsHeader(settings.context, settings.overflow, settings.seed, digest, order=job.order)
        job.output.parent.mkdir(parents=True, exist_ok=True)
        save_windows(job.output, joined, header)
        write_text(job.work / REPORT, json.dumps(self._report()))

    def _report(self) -> dict[str, object]:
        """Return the figures of the windows."""
        job, num_long = self.job, 0
        sums: list[QualitySums] = []
        clusters: list[int] = []
        for partition in range(job.num_partitions):
            for figures in json_settings(job.partition_path(partition, "json").read_text()):
                sums.append(QualitySums(**{**figures["sums"], "vectors": tuple(figures["sums"]["vectors"])}))
                clusters += figures["clusters"]
                num_long += figures["num_long"]
        return {
            "documents": job.num_documents,
            "tokens": len(job.corpus.tokens),
            **dataclasses.asdict(reduce(add, sums).quality(job.settings.context)),
            "documents_longer_than_context": num_long,
            "clusters": len(clusters),
            "largest_cluster_tokens": max(clusters),
            "median_cluster_tokens": int(np.median(clusters)),
        }


def sculpt_stages(job: SculptJob, tasks: int, last: Step | None = None) -> list[Stage]:
    """Return the stages; ``last`` runs once, after the windows are written."""
    join: list[Step] = [Join(job)]
    return [
        Stage("fit", 1, [Fit(job)]),
        Stage("embed", tasks, [Embed(job)]),
        Stage("windows", tasks, [FillWindows(job)]),
        Stage("join", 1, join if last is None else [*join, last]),
    ]


def clustered_pieces(job: SculptJob) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return vectors [n, d], clusters [n] and tokens [n] of all pieces, for a picture of the clusters."""
    vectors, clusters, tokens, first = [], [], [], 0
    for partition in range(job.num_partitions):
        for pieces, of_block in FillWindows(job).blocks(partition):
            vectors.append(of_block)
            tokens.append(pieces["length"])
        cluster = mapped(job.partition_path(partition, "clusters.npy"))
        clusters.append(cluster + first)
        first += int(cluster.max()) + 1 if len(cluster) else 0
    return np.concatenate(vectors), np.concatenate(clusters), np.concatenate(tokens)


def embedded_pieces(corpus: CorpusTokens, context: int, embedder: str | None, seed: int) -> Pieces:
    """Return the documents of a data set, split at every ``context`` tokens, with the embedding of each piece."""
    table = sample_table(corpus.lengths, context)
    vectors = embed(corpus, table, embedder, seed)
    return Pieces(table.document.astype(np.int64), table.start, table.length, vectors)
