"""Compare the near-duplicates of ``bytescale data clean`` with an exact search over all pairs, on manuals of Debian.

    .venv/bin/python scripts/bench/data/duplicates.py --debian DIR [--most-pages 1000] [--json]

DIR holds unpacked packages: two versions of the Linux documentation (*.rst.txt), and the GIMP manual in two spellings
of English (*.html, without tags). If DIR has no packages, ``--download`` fetches them with ``apt-get download``;
without ``--download`` the script names the missing packages and ends.

Reported are recall and precision of pairs against the exact join at each similarity, whether the order of the sources
changes the kept documents, documents per second of one core, and the peak of memory. One copy of a planted licence
header must stay.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import unescape
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.data.clean.output import gather
from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.clean.stages import stages_of
from bytescale_ext.data.clean.words import jaccard, shingles
from bytescale_ext.data.tasks.stages import ExecutorSettings, run_stages
from bytescale_ext.new_file import write_text
from scripts.bench.progress import progress

PACKAGES = ("linux-doc-6.1", "linux-doc-6.12", "gimp-help-en", "gimp-help-en-gb")
LEAST_CHARACTERS = 500
LEVELS = (0.95, 0.9, 0.8)
HEADER = (
    "This planted header belongs to every tenth document of the corpus alone.\n"
    "It grants permission to copy, to distribute and to change this document for any purpose.\n"
    "No warranty of any kind is given by those who have written it for this test.\n"
)


@dataclass(frozen=True)
class Bench:
    """The figures; recall and true pairs by the least similarity of a pair."""

    documents: int
    distinct: int
    mbytes: float
    true_pairs: dict[float, int]
    recall: dict[float, float]
    precision: float
    kept: int
    same_in_any_order: bool
    headers_left: int
    documents_per_second: float
    peak_mbytes: float


def packages_of(root: Path) -> list[Path]:
    """Return the folders of the packages below ``root``."""
    names = "|".join(map(re.escape, PACKAGES))
    return sorted(path for path in root.iterdir() if path.is_dir() and re.match(rf"({names})(_|$)", path.name))


def download(root: Path) -> None:
    """Fetch and unpack every available version of the packages."""
    for package in PACKAGES:
        listing = subprocess.run(["apt-cache", "madison", package], capture_output=True, text=True).stdout
        for version in {line.split("|")[1].strip() for line in listing.splitlines()}:
            subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=root, check=True, capture_output=True)
    for archive in sorted(root.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, root / archive.name.removesuffix("_all.deb")], check=True)


def texts_of(package: Path, most: int) -> list[str]:
    """Return the first ``most`` texts of a package by path, each of at least ``LEAST_CHARACTERS``."""
    texts = []
    for path in sorted([*package.rglob("*.rst.txt"), *package.rglob("*.html")]):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".html":
            text = unescape(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style).*?</\1>", " ", text)))
        if len(text) >= LEAST_CHARACTERS:
            texts.append(text)
    return texts[:most]


def true_pairs(sets: Sequence[np.ndarray], least: float) -> dict[tuple[int, int], float]:
    """Return the similarity of each pair of sets, sorted arrays [n], that is at least ``least``.

    The join is exact: two such sets share a member among the ``1 - least`` rarest members of each.
    """
    frequency = Counter(int(member) for members in sets for member in members)
    index: dict[int, list[int]] = {}
    pairs: dict[tuple[int, int], float] = {}
    for number, members in enumerate(sets):
        rarest = sorted(members.tolist(), key=lambda member: (frequency[member], member))
        rarest = rarest[: len(rarest) - int(np.ceil(least * len(rarest) - 1e-9)) + 1]
        for other in {other for member in rarest for other in index.get(member, ())}:
            sizes = sorted((len(members), len(sets[other])))
            share = jaccard(members, sets[other]) if sizes[0] >= least * sizes[1] else 0.0
            if share >= least:
                pairs[other, number] = share
        for member in rarest:
            index.setdefault(member, []).append(number)
    return pairs


def clean(sources: Sequence[Source], folder: Path, steps: tuple[str, ...]) -> tuple[list[dict[str, object]], float]:
    """Clean sources in this process; return the kept documents and the processor seconds."""
    recipe = Recipe(tuple(sources), steps=steps, tasks=2)
    began = time.process_time()  # one process does all the work
    run_stages(stages_of(recipe, folder / "work", lambda *_: None), folder / "work", ExecutorSettings())
    seconds = time.process_time() - began
    shards = [shard for source in gather(recipe, folder / "work", folder / "out") for shard in source.shards]
    return [json.loads(line) for shard in shards for line in shard.read_text().splitlines()], seconds


def write_sources(texts: Sequence[Sequence[str]], folder: Path) -> list[Source]:
    """Write each list of texts as a file of lines of JSON."""
    sources = []
    for number, documents in enumerate(texts):
        path = folder / f"{number}.jsonl"
        lines = (json.dumps({"text": text, "id": f"{number}/{place}"}) + "\n" for place, text in enumerate(documents))
        write_text(path, "".join(lines))
        sources.append(Source(f"source{number}", str(path), "jsonl", "*", ()))
    return sources


def dropped_pairs(folder: Path, texts: dict[str, str]) -> set[tuple[str, str]]:
    """Return the pairs of a dropped text and the text kept for it, from ``duplicates.jsonl``."""
    paths = sorted((folder / "work" / "duplicates").glob("*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {(texts[row["dropped"]], texts[row["kept"]]) for row in rows}


def measure(packages: Sequence[Sequence[str]]) -> Bench:
    """Find the duplicates of these texts, one list for each package, and compare them with the exact join."""
    named = {f"{number}/{place}": text for number, texts in enumerate(packages) for place, text in enumerate(texts)}
    distinct = list(dict.fromkeys(named.values()))
    parts = progress(("cleaning", "cleaning in reverse order", "headers", "exact join"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        next(parts)
        kept, seconds = clean(write_sources(packages, folder), folder / "forward", ("exact", "near"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        dropped = dropped_pairs(folder / "forward", named)
        next(parts)
        reverse = write_sources([texts[::-1] for texts in packages[::-1]], folder)
        kept_in_reverse, _ = clean(reverse, folder / "reverse", ("exact", "near"))
        next(parts)
        headers = headers_left(distinct[:200], folder)
    next(parts)
    pairs = true_pairs([shingles(text, 5) for text in distinct], min(LEVELS))
    next(parts, None)
    stays = {str(document["text"]) for document in kept}
    missed = [share for (i, j), share in pairs.items() if distinct[i] in stays and distinct[j] in stays]
    counts = {level: sum(share >= level for share in pairs.values()) for level in LEVELS}
    place = {text: number for number, text in enumerate(distinct)}
    right = [a == b or tuple(sorted((place[a], place[b]))) in pairs for a, b in dropped]
    return Bench(
        documents=len(named),
        distinct=len(distinct),
        mbytes=sum(map(len, named.values())) / 1e6,
        true_pairs=counts,
        recall={level: 1 - sum(share >= level for share in missed) / max(counts[level], 1) for level in LEVELS},
        precision=sum(right) / max(len(right), 1),
        kept=len(kept),
        same_in_any_order=stays == {str(document["text"]) for document in kept_in_reverse},
        headers_left=headers,
        documents_per_second=len(named) / seconds,
        peak_mbytes=peak,
    )


def headers_left(texts: Sequence[str], folder: Path) -> int:
    """Plant a header in every tenth document, clean them, and return the number of headers that stay."""
    planted = [HEADER + text if place % 10 == 0 else text for place, text in enumerate(texts)]
    (folder / "planted").mkdir()
    kept, _ = clean(write_sources([planted], folder / "planted"), folder / "headers", ("sentences",))
    return sum(HEADER.splitlines()[0] in str(document["text"]) for document in kept)


def text_of(bench: Bench) -> str:
    """Return the figures in lines."""
    lines = [
        f"{bench.documents:,} documents of {bench.mbytes:.1f} MB, {bench.distinct:,} distinct, {bench.kept:,} kept",
        *(
            f"similarity {level}: {bench.true_pairs[level]:,} pairs by the exact join, recall {bench.recall[level]:.4f}"
            for level in LEVELS
        ),
        f"precision {bench.precision:.4f}, the same documents in any order: {bench.same_in_any_order}",
        f"planted headers left: {bench.headers_left}",
        f"{bench.documents_per_second:,.0f} documents per processor second, peak {bench.peak_mbytes:,.0f} MB",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debian", type=Path, required=True, help="folder of the packages")
    parser.add_argument("--download", action="store_true", help="fetch the packages into that folder")
    parser.add_argument("--most-pages", type=int, default=1 << 30, metavar="N", help="documents of a package (all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    args.debian.mkdir(parents=True, exist_ok=True)
    if args.download and not packages_of(args.debian):
        download(args.debian)
    texts = [texts_of(package, args.most_pages) for package in packages_of(args.debian)]
    texts = [package for package in texts if package]
    if len(texts) < 2:
        print(f"skipped: {args.debian} holds fewer than two of {', '.join(PACKAGES)}; add --download", file=sys.stderr)
        return 0
    bench = measure(texts)
    print(json.dumps(asdict(bench), indent=2) if args.json else text_of(bench))
    return 0


if __name__ == "__main__":
    sys.exit(main())
