"""What a small model learns from windows of related documents beside three other ways to make windows. No GPU.

    OMP_NUM_THREADS=1 python scripts/bench/data/helps.py --folder DIR [--debian DIR] [--workers 2] [--quick]

As where DataSculpt is used, a model is first trained on short windows, and then, at a longer context, on the windows of
each way: the same documents, once each, so equal tokens. Documents are sections of the sources (*.rst.txt) of linux-doc
and Python's documentation below --debian, or of Python files of the environment where it is left out; a token is a
byte. Files of the held-out documents, of the first training and of the second differ.

Reported on held-out documents: the loss by position in windows of related and of unrelated documents, and a probe: the
loss on a name that no training text has, with a document that has the name at the begin of the window and without.
Each run is kept in --folder, and a second call goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bytescale_ext.data.corpus.embed import reduced, word_counts
from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.data.samples.sources import environment_entries
from bytescale_ext.plan.sculpt.baselines import concatenated, fitted, neighbour_path
from bytescale_ext.plan.sculpt.pieces import Pieces, Table
from bytescale_ext.plan.sculpt.quality import quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt
from scripts.bench.data.byte_model import ByteModel, ModelSize, Schedule, losses_by_position, token_losses, train
from scripts.bench.data.related_texts import (
    Document,
    Probe,
    documents_of,
    names_of,
    probes_of,
    share_of,
    tokens_of,
    windows_of,
)

ARMS = ("concatenation", "best fit", "nearest neighbours", "sculpt")
PARTS = 4
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of 95 % for so many seeds
SEED = 1234


@dataclass(frozen=True)
class Trial:
    """Sizes of the experiment; a folder holds the runs of one."""

    context: int = 1024
    first_context: int = 512
    first_tokens: int = 800_000
    tokens: int = 300_000
    windows: int = 24
    probes: int = 80
    shortest: int = 100
    longest: int = 400
    seeds: int = 3
    model: ModelSize = field(default_factory=ModelSize)


@dataclass(frozen=True)
class Texts:
    """Windows and probes of all runs.

    Attributes:
        first: short windows of the first training.
        documents: tokens of the documents of the second.
        pieces: what these are about.
        held_out: windows of held-out documents, related and not.
        probes: of held-out documents.
    """

    first: list[np.ndarray]
    documents: list[np.ndarray]
    pieces: Pieces
    held_out: dict[str, list[np.ndarray]]
    probes: list[Probe]


def read_documents(root: Path | None, trial: Trial) -> list[Document]:
    """Return the documents of the packages below ``root``, or of the environment's Python files, in random order."""
    if root is None:
        named = {"/".join(entry.path.parts[-3:]): entry.path for entry in environment_entries("*.py")}
    else:
        folders = [*root.glob("linux-doc*"), *root.glob("python3*")]
        named = {str(path.relative_to(root)): path for folder in folders for path in folder.rglob("*.rst.txt")}
    names = sorted(named)
    found: list[Document] = []
    total = 0
    for i in np.random.RandomState(SEED).permutation(len(names)).tolist():
        texts = documents_of(named[names[i]].read_bytes(), trial.shortest, trial.longest)
        found += [Document(text, names[i]) for text in texts]
        total += sum(map(len, texts))
        if total > 4 * (trial.first_tokens + trial.tokens):
            break
    return found


def pieces_of(documents: Sequence[Document]) -> Pieces:
    """Return documents with what they are about."""
    vectors = reduced(word_counts(one.text.decode("utf-8", "replace") for one in documents), SEED)
    lengths = np.array([len(one.text) + 1 for one in documents], np.int64)
    return Pieces(np.arange(len(documents)), np.zeros_like(lengths), lengths, vectors)


def made_by(arm: str, pieces: Pieces, context: int, seed: int) -> Table:
    """Return the windows of a way [rows]."""
    if arm == "sculpt":
        return sculpt(pieces, SculptSettings(context, seed=seed), nearest_centres).table
    if arm == "concatenation":
        return concatenated(pieces, context, seed)
    return fitted(pieces, context) if arm == "best fit" else neighbour_path(pieces, context)


def prepare(documents: Sequence[Document], trial: Trial) -> Texts:
    """Return what all runs share. Raises ValueError where there are too few texts."""
    parts: dict[str, list[Document]] = {"held out": [], "first": [], "second": []}
    sizes = dict.fromkeys(parts, 0)
    for one in documents:
        share = share_of(one.file)
        name = "held out" if share < 4 else "first" if share < 12 else "second"
        if sizes[name] < {"first": trial.first_tokens, "second": trial.tokens}.get(name, 4 * trial.tokens):
            parts[name].append(one)
            sizes[name] += len(one.text) + 1
    if sizes["first"] < trial.first_tokens or sizes["second"] < trial.tokens:
        raise ValueError(f"too few texts: {sizes['first']} and {sizes['second']} bytes for the two trainings")
    stream = np.concatenate([tokens_of(one.text) for one in parts["first"]])
    first = np.split(stream, range(trial.first_context, len(stream), trial.first_context))[:-1]
    known = set().union(*(names_of(one.text) for name in ("first", "second") for one in parts[name]))
    pieces, tokens = pieces_of(parts["held out"]), [tokens_of(one.text) for one in parts["held out"]]
    held_out = {}
    for name, arm in (("related", "sculpt"), ("unrelated", "best fit")):
        every = windows_of(made_by(arm, pieces, trial.context, SEED), tokens)
        windows = [window for window in every if len(window) > 0.75 * trial.context]
        order = np.random.RandomState(SEED).permutation(len(windows))[: trial.windows]
        held_out[name] = [windows[i] for i in order.tolist()]
    probes = probes_of(parts["held out"], known, trial.context, SEED, trial.probes)
    return Texts(first, [tokens_of(one.text) for one in parts["second"]], pieces_of(parts["second"]), held_out, probes)


def first_run(folder: Path, texts: Texts, trial: Trial, seed: int) -> None:
    """Train a model on short windows, unless it is there."""
    path = folder / f"first-{seed}.pt"
    if path.exists():
        return
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = ByteModel(trial.model)
    order = np.random.RandomState(seed).permutation(len(texts.first)).tolist()
    losses = train(model, [texts.first[i] for i in order], Schedule(last=0.3))
    print(f"first training, seed {seed}: loss {np.mean(losses[-20:]):.3f}", file=sys.stderr, flush=True)
    torch.save(model.state_dict(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def second_run(folder: Path, texts: Texts, trial: Trial, run: tuple[int, str]) -> None:
    """Go on with the windows of a way and measure, unless it is done. ``run``: seed and way."""
    seed, arm = run
    path = folder / f"{arm.replace(' ', '-')}-{seed}.json"
    if path.exists():
        return
    torch.set_num_threads(1)
    model = ByteModel(trial.model)
    model.load_state_dict(torch.load(folder / f"first-{seed}.pt"))
    table = made_by(arm, texts.pieces, trial.context, seed)
    windows = windows_of(table, texts.documents)
    order = np.random.RandomState(seed).permutation(len(windows)).tolist()
    losses = train(model, [windows[i] for i in order], Schedule(rate=0.01, last=0.0))
    found = {
        "arm": arm,
        "seed": seed,
        "relevance": quality_of(table, texts.pieces, trial.context).relevance,
        "training": float(np.mean(losses[-20:])),
        **measured(model, texts, trial),
    }
    print(f"{arm}, seed {seed}: loss {found['training']:.3f}", file=sys.stderr, flush=True)
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


def measured(model: ByteModel, texts: Texts, trial: Trial) -> dict[str, float]:
    """Return the losses on held-out windows by position, and those of the probes, in nats a byte."""
    found: dict[str, float] = {}
    for name, windows in texts.held_out.items():
        by_position = losses_by_position(model, windows, trial.context, PARTS)
        found |= {f"{name} {part + 1}/{PARTS}": loss for part, loss in enumerate(by_position)}
    for name in ("found", "absent"):
        told = token_losses(model, [getattr(probe, name) for probe in texts.probes])
        spans = [slice(probe.begin - 1, probe.end - 1) for probe in texts.probes]
        found[f"name {name}"] = float(np.mean([losses[at].mean() for (losses, _), at in zip(told, spans, strict=True)]))
        found[f"right {name}"] = float(np.mean([right[at].all() for (_, right), at in zip(told, spans, strict=True)]))
    found["name gain"] = found["name absent"] - found["name found"]
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the 95 % interval of Student's t; not a number for one value."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    return float(np.mean(values)), STUDENT.get(len(values), 2.0) * spread / len(values) ** 0.5


def text_of(rows: Sequence[dict[str, float]]) -> str:
    """Return the means of each way, and below the differences from concatenation with their intervals over seeds."""
    figures = [name for name in rows[0] if name not in ("arm", "seed")]
    by_arm = {arm: {row["seed"]: row for row in rows if row["arm"] == arm} for arm in ARMS}
    by_arm = {arm: found for arm, found in by_arm.items() if found}
    lines = ["| | " + " | ".join(by_arm) + " |", "|---" * (1 + len(by_arm)) + "|"]
    for name in figures:
        means = [f"{np.mean([row[name] for row in found.values()]):.3f}" for found in by_arm.values()]
        lines.append(f"| {name} | " + " | ".join(means) + " |")
    base = by_arm.pop(ARMS[0], {})
    lines += ["", "less that of concatenation, and half the 95 % interval over seeds:"]
    for name in figures:
        told = []
        for found in by_arm.values():
            both = [found[seed][name] - base[seed][name] for seed in sorted(found.keys() & base.keys())]
            told.append("{:+.4f} ({:.4f})".format(*interval(both)) if both else "-")
        lines.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def run_all(folder: Path, texts: Texts, trial: Trial, workers: int) -> list[dict[str, float]]:
    """Run what is not in the folder yet and return all figures."""
    seeds = range(trial.seeds)
    runs = [(seed, arm) for seed in seeds for arm in ARMS]
    if workers == 1:
        for seed in seeds:
            first_run(folder, texts, trial, seed)
        for run in runs:
            second_run(folder, texts, trial, run)
    else:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            list(pool.map(partial(first_run, folder, texts, trial), seeds))
            list(pool.map(partial(second_run, folder, texts, trial), runs))
    paths = [folder / f"{arm.replace(' ', '-')}-{seed}.json" for seed, arm in runs]
    return [json.loads(path.read_text()) for path in paths]


def check_folder(folder: Path, told: str) -> None:
    """Make the folder for runs of these settings. Raises ValueError where it holds runs of others."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    if path.exists() and path.read_text() != told:
        raise ValueError(f"{folder} holds runs of other settings: give another --folder")
    path.write_text(told)


def main() -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--debian", type=Path, help="folder of unpacked packages (Python files of the environment)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time (1)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each way (3)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the second training")
    parser.add_argument("--first-tokens", type=int, metavar="N", help="of the first training")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: shows that it works")
    args = parser.parse_args()
    trial = replace(Trial(), seeds=args.seeds)
    if args.quick:
        tiny = ModelSize(32, 1, 2, 256)
        trial = replace(trial, first_tokens=40_000, tokens=40_000, windows=4, probes=8, seeds=2, model=tiny)
    given = {"tokens": args.tokens, "first_tokens": args.first_tokens}
    trial = replace(trial, **{name: value for name, value in given.items() if value})
    try:
        texts = prepare(read_documents(args.debian, trial), trial)
        check_folder(args.folder, json.dumps({**asdict(trial), "seeds": 0, "documents": len(texts.documents)}))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(texts.documents):,} documents, {len(texts.probes)} probes", file=sys.stderr, flush=True)
    print(text_of(run_all(args.folder, texts, trial, args.workers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
