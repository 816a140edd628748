"""Compare the near-duplicates of ``bytescale data clean`` with datatrove's own MinHash, on planted duplicates.

    .venv/bin/python scripts/bench/data/minhash.py [--families 100] [--words 300] [--json]

A family is a text of random words and one copy with 1, 5 or 20 % of the words changed. Each of eight scripts has
``--families`` families of each kind. Chinese and Thai are written without spaces. datatrove runs with its default
settings and its own steps, and with our rules for words, because its tokenizers for these languages need packages and
downloads. Each program runs in a process of its own with one task.

Recall is the share of families that lose a document. Precision is the share of the dropped documents whose other
document stays. ``unlike`` counts the dropped documents whose similarity to the other document is below 0.5.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.data.clean.recipe import Recipe, Source
from bytescale_ext.data.clean.shelf import decisions_path, shelved
from bytescale_ext.data.clean.stages import stages_of
from bytescale_ext.data.clean.words import RULES, jaccard, shingles
from bytescale_ext.data.tasks.stages import ExecutorSettings, run_stages
from bytescale_ext.new_file import write_text

SCRIPTS = {
    "Latin": ("abcdefghijklmnopqrstuvwxyz", 6, " "),
    "Cyrillic": ("абвгдежзиклмнопрстуфхцчшщыьэюя", 6, " "),
    "Greek": ("αβγδεζηθικλμνξοπρστυφχψω", 6, " "),
    "Arabic": ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", 5, " "),
    "Devanagari": ("कखगघचछजझटठडढतथदधनपफबभमयरलवशषसह", 4, " "),
    "Hangul": ("가나다라마바사아자차카타파하거너더러머버서어저처커터퍼허", 3, " "),
    "Han": ("的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年", 2, ""),
    "Thai": ("กขคงจชซดตถทนบปผพฟมยรลวสหอ", 4, ""),
}
CHANGES = (0.01, 0.05, 0.2)
VOCABULARY = 5000
OTHER = {"original": "copy", "copy": "original"}


@dataclass(frozen=True)
class Row:
    """Figures of one program: recall by script and share of changed words, precision, and costs."""

    recall: dict[str, dict[float, float]]
    precision: float
    unlike: int
    dropped: int
    seconds: float
    peak_mbytes: float


def corpus(families: int, words: int) -> dict[str, str]:
    """Return texts by script, share of changed words, family, and original or copy."""
    random, texts = np.random.RandomState(1234), {}
    for script, (letters, length, blank) in SCRIPTS.items():
        vocabulary = ["".join(random.choice(list(letters), length)) for _ in range(VOCABULARY)]
        for change, family in product(CHANGES, range(families)):
            chosen = random.randint(0, VOCABULARY, words)
            changed = chosen.copy()
            places = random.choice(words, max(round(change * words), 1), replace=False)
            changed[places] = random.randint(0, VOCABULARY, len(places))
            for name, numbers in (("original", chosen), ("copy", changed)):
                texts[f"{script}/{change}/{family}/{name}"] = blank.join(vocabulary[word] for word in numbers)
    names = list(texts)
    return {names[place]: texts[names[place]] for place in random.permutation(len(names))}


def ours(texts: dict[str, str], folder: Path, least: float) -> set[str]:
    """Return the documents that stay after ``bytescale data clean``."""
    path = folder / "texts.jsonl"
    write_text(path, "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
    recipe = Recipe((Source("docs", str(path), "jsonl", "*", ()),), steps=("exact", "near"), jaccard=least)
    run_stages(stages_of(recipe, folder / "work", lambda *_: None), folder / "work", ExecutorSettings())
    decisions = np.load(decisions_path(folder / "work", 0))
    return {str(values["id"]) for number, values in shelved(folder / "work", 0) if decisions["kept"][number]}


def theirs(texts: dict[str, str], folder: Path) -> set[str]:
    """Return the documents that stay after datatrove's four steps."""
    config = MinhashConfig(hash_config=HashConfig(precision=64, hash_fc="sha1"))
    documents = [Document(text, name) for name, text in texts.items()]
    places = [str(folder / name) for name in ("signatures", "matches", "removed")]
    MinhashDedupSignature(places[0], config=config, language=RULES).run(iter(documents), 0, 1)
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(places[0], places[1], config=config).run(None, bucket, config.num_buckets)
    MinhashDedupCluster(places[1], places[2], config=config).run(None, 0, 1)
    return {document.id for document in MinhashDedupFilter(places[2]).run(iter(documents), 0, 1)}


def measured(name: str, texts: dict[str, str]) -> tuple[set[str], float, float]:
    """Return the documents that stay, the processor seconds and the peak of memory in MB, of a new process."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        kept = theirs(texts, Path(folder)) if name == "datatrove" else ours(texts, Path(folder), float(name))
        return kept, time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row_of(name: str, texts: dict[str, str]) -> Row:
    """Run one program and compare what stays with what was planted."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        kept, seconds, peak = pool.apply(measured, (name, texts))
    dropped = sorted(set(texts) - kept)
    found = {name.rpartition("/")[0] for name in dropped}
    families = len(texts) / 2 / len(SCRIPTS) / len(CHANGES)
    recall = {
        script: {change: sum(name.startswith(f"{script}/{change}/") for name in found) / families for change in CHANGES}
        for script in SCRIPTS
    }
    others = {name: f"{name.rpartition('/')[0]}/{OTHER[name.rpartition('/')[2]]}" for name in dropped}
    right = sum(other in kept for other in others.values())
    unlike = sum(jaccard(shingles(texts[name], 5), shingles(texts[other], 5)) < 0.5 for name, other in others.items())
    return Row(recall, right / max(len(dropped), 1), unlike, len(dropped), seconds, peak)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=100, metavar="N", help="families of a script (100)")
    parser.add_argument("--words", type=int, default=300, metavar="N", help="words of a text (300)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    texts = corpus(args.families, args.words)
    programs = {"datatrove": "datatrove", "ours, 0.8": "0.8", "ours, 0.5": "0.5"}
    rows = {label: row_of(name, texts) for label, name in programs.items()}
    if args.json:
        print(json.dumps({label: asdict(row) for label, row in rows.items()}, indent=2))
        return 0
    print(f"{len(texts):,} documents; recall at 1 / 5 / 20 % of the words changed")
    print("| | " + " | ".join([*SCRIPTS, "precision", "dropped", "unlike", "processor s", "MB"]) + " |")
    print("|---" * (len(SCRIPTS) + 6) + "|")
    for label, row in rows.items():
        recalls = [" / ".join(f"{share:.0%}" for share in row.recall[script].values()) for script in SCRIPTS]
        figures = [f"{row.precision:.1%}", f"{row.dropped:,}", f"{row.unlike:,}", f"{row.seconds:.0f}"]
        print("| " + " | ".join([label, *recalls, *figures, f"{row.peak_mbytes:,.0f}"]) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
