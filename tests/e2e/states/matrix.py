"""Compare runs with paged and with resident Adam states in all combinations: python -m tests.e2e.states.matrix.

A cell is a layout with all pages in host memory, or most pages on a disk. Each cell compares three runs with a resident
run: a paged run of 20 steps, a resident run that continues from its middle, and a paged run that continues from the
middle of the resident run. The losses of all steps, and every tensor of the last checkpoint (parameters, float32
copies, moments), must be equal bit for bit. Cells with a row in the file of results do not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.corpora import write_documents
from tests.e2e.states.test_paged import BF16, HOST_GB, PAGED, PP, SAMPLES, TP, compared
from tests.e2e.training import HDP, MODEL, TRAIN, step_losses, train_ranks
from tests.harness import run_ranks

STEPS, SAVED = 20, 10
TIERS = ("host", "NVMe")
DATA = ("HDP", "plain")


@dataclass(frozen=True)
class Layout:
    """Layout of a run. HDP runs have bf16 and a sharded optimizer; plain runs have float32 and replicas."""

    tp: int
    pp: int
    data: str

    @property
    def name(self) -> str:
        """Key of the layout's results."""
        return f"tp {self.tp}, pp {self.pp}, {self.data}"

    @property
    def num_ranks(self) -> int:
        """Number of ranks; without tensor parallelism and pipelines, two ranks share the data."""
        return max(2, self.tp * self.pp)

    @property
    def flags(self) -> list[object]:
        """Return the command line of the run, without data and folders."""
        hdp = [*HDP, "--hdp-tokens-per-rank", 256, *BF16, "--use-distributed-optimizer"]
        of_data = hdp if self.data == "HDP" else SAMPLES
        return [*MODEL, *TRAIN, *of_data, *(TP if self.tp > 1 else ()), *(PP if self.pp > 1 else ())]


LAYOUTS = [Layout(*one) for one in itertools.product((1, 2), (1, 2), DATA)]


@dataclass(frozen=True)
class Cell:
    """Result of the runs of a cell.

    Attributes:
        layout: layout of the cell.
        tier: place of most pages.
        num_tensors: number of tensors in the last checkpoint.
        different: tensors and losses that differ, by run.
    """

    layout: str
    tier: str
    num_tensors: int
    different: list[str]


def run(layout: Layout, documents: Path, folder: Path, *flags: object) -> list[float]:
    """Train to the last step, and return the losses of its steps."""
    common = ["--data-path", documents, "--train-iters", STEPS, "--save-interval", SAVED, "--save", folder]
    logged = ["--hdp-log-dir", folder] if layout.data == "HDP" else []
    outcomes = train_ranks(layout.num_ranks, *layout.flags, *common, *logged, *flags)
    assert outcomes[0].code in (None, 0), outcomes[0].text[-2000:]
    assert ("states in pages of 4,096 bytes" in outcomes[0].text) == ("paged" in flags)
    assert (" pages in " in outcomes[0].text) == ("--state-nvme" in flags)
    return step_losses(folder) if logged else outcomes[-1].losses


def middle_of(folder: Path) -> Path:
    """Return a folder with only the checkpoint of the middle of a run.

    With ``--ckpt-step`` and a sharded optimizer, Megatron would load Adam's states of the last checkpoint.
    """
    saved = f"iter_{SAVED:07d}"
    middle = folder / "middle"
    if not middle.exists():
        middle.mkdir()
        (middle / saved).symlink_to(folder / saved)
        (middle / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return middle


def differences(found: Sequence[float], expected: Sequence[float], folders: tuple[Path, Path]) -> tuple[int, list[str]]:
    """Return the number of compared tensors, and the names of tensors and losses that differ.

    Megatron's second log line of a run has the mean of its first two steps.
    """
    number, different = run_ranks(compared, 1, folders, STEPS, init_group=False)[0]
    last = list(expected)[-len(found) :]
    equal = found == last or (found[:1] + found[2:] == last[:1] + last[2:] and len(found) < STEPS)
    equal &= len(found) in (STEPS, STEPS - SAVED)
    return number, [*different, *([] if equal else [f"losses {found} and not {expected}"])]


def try_cells(layout: Layout, tiers: Iterable[str], documents: Path, folder: Path) -> Iterable[Cell]:
    """Yield the cells of a layout, which share one resident run."""
    resident = run(layout, documents, folder / "resident")
    for tier in tiers:
        place = folder / tier
        place.mkdir(parents=True)
        pages = [*PAGED, *(["--state-nvme", place, "--state-host-gb", HOST_GB] if tier == "NVMe" else [])]
        runs: dict[str, tuple[list[object], Path | None]] = {
            "paged": (pages, None),
            "paged then resident": ([], place / "paged"),
            "resident then paged": (pages, folder / "resident"),
        }
        counts, different = [], []
        for name, (flags, before) in runs.items():
            load = [] if before is None else ["--load", middle_of(before)]
            losses = run(layout, documents, place / name, *flags, *load)
            number, found = differences(losses, resident, (place / name, folder / "resident"))
            counts.append(number)
            different += [f"{name}: {one}" for one in found]
        yield Cell(layout.name, tier, min(counts), different)


def table(cells: Sequence[Cell]) -> str:
    """Return the cells as rows of a table."""
    rows = [f"| layout | {' | '.join(TIERS)} |", f"|---|{'---|' * len(TIERS)}"]
    found = {(cell.layout, cell.tier): cell for cell in cells}
    for layout in LAYOUTS:
        words = []
        for tier in TIERS:
            cell = found.get((layout.name, tier))
            words.append(
                "not run"
                if cell is None
                else f"{len(cell.different)} differ"
                if cell.different
                else f"{cell.num_tensors} tensors equal"
            )
        rows.append(f"| {layout.name} | {' | '.join(words)} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None, attempt: Callable[..., Iterable[Cell]] = try_cells) -> int:
    """Run the cells without a result, and print the table; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/states/matrix.json"), help="(%(default)s)")
    args = parser.parse_args(argv)
    cells = [Cell(**one) for one in json.loads(args.results.read_text())] if args.results.exists() else []
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for layout in LAYOUTS:
        done = {cell.tier for cell in cells if cell.layout == layout.name}
        tiers = [tier for tier in TIERS if tier not in done]
        if not tiers:
            continue
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            documents = write_documents(Path(folder) / "docs", copies=7)
            for cell in attempt(layout, tiers, documents, Path(folder)):
                cells.append(cell)
                args.results.write_text(json.dumps([asdict(one) for one in cells], indent=1))
                print(f"{cell.layout}, {cell.tier}: {'; '.join(cell.different) or 'equal'}", flush=True)
    print(table(cells))
    return int(any(cell.different for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
