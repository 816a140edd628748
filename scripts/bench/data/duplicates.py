"""Near-duplicates that ``bytescale data clean`` finds, beside an exact search over all pairs, on manuals of Debian.

    python scripts/bench/data/duplicates.py --debian DIR [--most-pages 1000] [--json]

DIR holds unpacked packages, or gets them: two versions of the Linux documentation (*.rst.txt), and the GIMP manual in
two spellings of English (*.html, without tags). Where DIR has none of them and --download is given, ``apt-get
download`` fetches what the archive has; without it the script says what is missing and ends.

Reported: recall and precision of the pairs against the exact join at each similarity, whether the order of the sources
changes what stays, documents a second of one core, and the most memory. Planted licence headers must stay once.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bytescale_ext.data.clean.output import gather
from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.clean.stages import Where, run_stages, stages_of
from bytescale_ext.data.clean.words import jaccard, shingles

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
    """What was measured; recall and precision by the least similarity of a pair."""

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
    """Return the folders of the packages below ``root`` that hold manuals."""
    names = "|".join(map(re.escape, PACKAGES))
    return sorted(path for path in root.iterdir() if path.is_dir() and re.match(rf"({names})(_|$)", path.name))


def download(root: Path) -> None:
    """Fetch and unpack every version of the packages that the archive of this machine has."""
    for package in PACKAGES:
        told = subprocess.run(["apt-cache", "madison", package], capture_output=True, text=True).stdout
        for version in {line.split("|")[1].strip() for line in told.splitlines()}:
            subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=root, check=True, capture_output=True)
    for archive in sorted(root.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, root / archive.name.removesuffix("_all.deb")], check=True)


def texts_of(package: Path, most: int) -> list[str]:
    """Return the texts of a package of at least ``LEAST_CHARACTERS``, the first ones by path."""
    texts = []
    for path in sorted([*package.rglob("*.rst.txt"), *package.rglob("*.html")]):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".html":
            text = unescape(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style).*?</\1>", " ", text)))
        if len(text) >= LEAST_CHARACTERS:
            texts.append(text)
    return texts[:most]


def true_pairs(sets: Sequence[np.ndarray], least: float) -> dict[tuple[int, int], float]:
    """Return all pairs of sets, sorted arrays [n], with a similarity of at least ``least``, and their similarities.

    An exact join: two such sets share one of their rarest members, of which each has a share of ``1 - least``.
    """
    often = Counter(int(one) for members in sets for one in members)
    posted: dict[int, list[int]] = {}
    found: dict[tuple[int, int], float] = {}
    for number, members in enumerate(sets):
        rarest = sorted(members.tolist(), key=lambda one: (often[one], one))
        rarest = rarest[: len(rarest) - int(np.ceil(least * len(rarest) - 1e-9)) + 1]
        near = {other for one in rarest for other in posted.get(one, ())}
        for other in near:
            sizes = sorted((len(members), len(sets[other])))
            share = jaccard(members, sets[other]) if sizes[0] >= least * sizes[1] else 0.0
            if share >= least:
                found[other, number] = share
        for one in rarest:
            posted.setdefault(one, []).append(number)
    return found


def clean(sources: Sequence[Source], folder: Path, steps: tuple[str, ...]) -> tuple[list[dict[str, object]], float]:
    """Clean sources in this process; return the documents that stay, and the seconds of its core."""
    recipe = Recipe(tuple(sources), steps=steps, tasks=2)
    began = time.process_time()  # one process does all of it
    run_stages(stages_of(recipe, folder / "work", lambda *_: None), folder / "work", Where())
    seconds = time.process_time() - began
    shards = [shard for one in gather(recipe, folder / "work", folder / "out") for shard in one.shards]
    return [json.loads(line) for shard in shards for line in shard.read_text().splitlines()], seconds


def write_sources(texts: Sequence[Sequence[str]], folder: Path) -> list[Source]:
    """Write each list of texts as a file of lines of JSON."""
    sources = []
    for number, some in enumerate(texts):
        path = folder / f"{number}.jsonl"
        lines = (json.dumps({"text": text, "id": f"{number}/{place}"}) + "\n" for place, text in enumerate(some))
        path.write_text("".join(lines))
        sources.append(Source(f"source{number}", str(path), "jsonl", "*", ()))
    return sources


def candidates(folder: Path, texts: dict[str, str]) -> set[tuple[str, str]]:
    """Return the pairs of texts that were dropped for each other, from ``duplicates.jsonl``."""
    rows = [json.loads(line) for line in (folder / "work" / "duplicates.jsonl").read_text().splitlines()]
    return {(texts[row["dropped"]], texts[row["kept"]]) for row in rows}


def measure(packages: Sequence[Sequence[str]]) -> Bench:
    """Find the duplicates of these texts, one list for each package, and compare with the exact join."""
    named = {f"{number}/{place}": text for number, some in enumerate(packages) for place, text in enumerate(some)}
    distinct = list(dict.fromkeys(named.values()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = write_sources(packages, folder)
        kept, seconds = clean(sources, folder / "one", ("exact", "near"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        dropped = candidates(folder / "one", named)
        turned = write_sources([some[::-1] for some in packages[::-1]], folder)
        again, _ = clean(turned, folder / "other", ("exact", "near"))
        headers = headers_left(distinct[:200], folder)
    stays = {str(one["text"]) for one in kept}
    sets = [shingles(text, 5) for text in distinct]
    pairs = true_pairs(sets, min(LEVELS))
    missed = [share for (one, other), share in pairs.items() if distinct[one] in stays and distinct[other] in stays]
    counts = {level: sum(share >= level for share in pairs.values()) for level in LEVELS}
    place = {text: number for number, text in enumerate(distinct)}
    right = [one == other or tuple(sorted((place[one], place[other]))) in pairs for one, other in dropped]
    return Bench(
        documents=len(named),
        distinct=len(distinct),
        mbytes=sum(map(len, named.values())) / 1e6,
        true_pairs=counts,
        recall={level: 1 - sum(one >= level for one in missed) / max(counts[level], 1) for level in LEVELS},
        precision=sum(right) / max(len(right), 1),
        kept=len(kept),
        same_in_any_order=stays == {str(one["text"]) for one in again},
        headers_left=headers,
        documents_per_second=len(named) / seconds,
        peak_mbytes=peak,
    )


def headers_left(texts: Sequence[str], folder: Path) -> int:
    """Return how many documents keep a header that was planted in every tenth of them."""
    planted = [HEADER + text if place % 10 == 0 else text for place, text in enumerate(texts)]
    (folder / "planted").mkdir()
    kept, _ = clean(write_sources([planted], folder / "planted"), folder / "headers", ("sentences",))
    return sum(HEADER.splitlines()[0] in str(one["text"]) for one in kept)


def text_of(bench: Bench) -> str:
    """Return the figures in lines."""
    lines = [
        f"{bench.documents:,} documents of {bench.mbytes:.1f} MB, {bench.distinct:,} distinct, {bench.kept:,} stay",
        *(
            f"similarity {level}: {bench.true_pairs[level]:,} pairs by the exact join, recall {bench.recall[level]:.4f}"
            for level in LEVELS
        ),
        f"precision {bench.precision:.4f}, the same documents in any order: {bench.same_in_any_order}",
        f"planted headers left: {bench.headers_left}",
        f"{bench.documents_per_second:,.0f} documents a second of processor time, peak {bench.peak_mbytes:,.0f} MB",
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
    texts = [some for some in texts if some]
    if len(texts) < 2:
        print(f"skipped: {args.debian} holds fewer than two of {', '.join(PACKAGES)}; add --download", file=sys.stderr)
        return 0
    bench = measure(texts)
    print(json.dumps(asdict(bench), indent=2) if args.json else text_of(bench))
    return 0


if __name__ == "__main__":
    sys.exit(main())
