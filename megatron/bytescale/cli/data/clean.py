"""``bytescale data clean``: filters, masking and removal of duplicates over all sources of a corpus, on datatrove."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bytescale_ext.data.clean.recipe import FILTERS, ON_BAD, POLICIES, STEPS, Recipe, read_recipe
from bytescale_ext.data.samples.sources import file_entries
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings

if TYPE_CHECKING:
    from bytescale_ext.data.clean.report import Report
    from bytescale_ext.data.clean.stages import Where

NAME = "clean"
HELP = "filter, mask and deduplicate the sources of a corpus, with a report; a killed run goes on where it was"
EXAMPLE = "bytescale data clean --input docs=texts --steps pii exact near --tokenize --output data/cleaned"

_EXECUTORS: Final = ("local", "ray", "slurm")
_WORK: Final = ".work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bytescale data clean``."""
    parser.add_argument("--recipe", type=Path, metavar="F.toml", help="sources and settings; flags replace its values")
    parser.add_argument(
        "--input", nargs="+", default=[], metavar="NAME=PATH", help="sources: files, or folders of text files"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="write NAME/*.jsonl and report.json")
    parser.add_argument("--steps", nargs="*", choices=STEPS, help="the steps that are on (default: all)")
    parser.add_argument("--filters", nargs="*", choices=FILTERS, help="filters of quality of all sources")
    parser.add_argument("--jaccard", type=float, metavar="J", help="least similarity of near-duplicates (0.8)")
    parser.add_argument("--policy", choices=POLICIES, help="keep one of a cluster (drop), or keep one and weigh it")
    parser.add_argument("--on-bad", choices=ON_BAD, help="broken lines, binary files, equal ids: count (skip) or fail")
    parser.add_argument("--text-key", metavar="KEY", help="key or column of the text (text)")
    parser.add_argument("--tasks", type=int, metavar="N", help="parts of the files (one for each file, up to 32)")
    parser.add_argument("--workers", type=int, metavar="N", help="tasks at a time (the processors of this machine)")
    parser.add_argument("--executor", choices=_EXECUTORS, default=_EXECUTORS[0], help="where tasks run (%(default)s)")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="a cluster of Ray (default: started here)")
    parser.add_argument(
        "--slurm", nargs="+", default=[], metavar="KEY=VALUE", help="partition=P memory_gb=N and options of sbatch"
    )
    parser.add_argument("--tokenize", action="store_true", help="also write NAME.bin and NAME.idx")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Clean the corpus, or go on with it, and print the report.

    Raises:
        ValueError: a flag, the recipe, a source or a document is bad, or a task has failed.
    """
    missing = [name for name in ("datatrove", "regex") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{missing[0]} is needed: pip install 'bytescale-megatron[data]'")
    fields = ("steps", "filters", "jaccard", "policy", "on_bad", "text_key", "tasks")
    recipe = read_recipe(args.recipe, args.input, {name: getattr(args, name) for name in fields})
    finish = Finish(recipe, args.output, tokenizer_settings(args), args.tokenize)
    where = _where(args)
    if finish.settings and not args.tokenize:
        raise ValueError("--tokenizer-type is for --tokenize")
    done = begin(finish)
    if not done:
        from bytescale_ext.data.clean.readers import check_packages
        from bytescale_ext.data.clean.stages import run_stages, stages_of

        check_packages(recipe)
        run_stages(stages_of(recipe, finish.work, finish), finish.work, where)
        if args.executor == "slurm" and not (args.output / "report.json").exists():
            print(f"submitted; the last job writes {args.output / 'report.json'}")
            return 0
        shutil.rmtree(finish.work)
    show(args.output, args.json)
    return 0


def begin(finish: Finish) -> bool:
    """Return whether the output is there already; else make the work folder, or find it as it was left.

    Raises:
        ValueError: the folder holds the output, or unfinished work, of another recipe or of other files.
    """
    from bytescale_ext.data.clean.report import REPORT, load_report
    from bytescale_ext.data.clean.tally import write_whole

    own, noted = finish.key(), finish.work / "recipe"
    other = "another recipe, or of files that have changed since: give another --output or remove the folder"
    if (finish.output / REPORT).exists():
        if load_report(finish.output / REPORT).fingerprint != own:
            raise ValueError(f"--output {finish.output}: it holds the output of {other}")
        return True
    if noted.exists():
        if noted.read_text() != own:
            raise ValueError(f"--output {finish.output}: it holds unfinished work of {other}")
        return False
    if finish.output.exists() and any(finish.output.iterdir()):
        raise ValueError(f"--output {finish.output}: this folder holds other files: give one of its own")
    write_whole(noted, own)
    return False


@dataclass(frozen=True)
class Finish:
    """The last stage: the shards get their final names, data sets are written from them, and then the report.

    Attributes:
        recipe: of the corpus.
        output: the folder.
        settings: of the tokenizer; none: a token is a byte.
        tokenize: whether data sets are written.
    """

    recipe: Recipe
    output: Path
    settings: dict[str, object]
    tokenize: bool

    @property
    def work(self) -> Path:
        """The folder of unfinished work."""
        return self.output / _WORK

    def key(self) -> str:
        """Return what tells this output from any other."""
        return json.dumps([self.recipe.fingerprint(), self.tokenize, self.settings])

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write what is left to write."""
        from bytescale_ext.data.clean.output import gather
        from bytescale_ext.data.clean.report import REPORT, make_report, save_report

        sets = gather(self.recipe, self.work, self.output)
        prefixes = {one.name: self._data_set(one.name, one.shards) for one in sets} if self.tokenize else {}
        duplicates = self.work / "duplicates.jsonl"
        if duplicates.exists():
            os.replace(duplicates, self.output / duplicates.name)
        report = make_report(self.recipe, self.work, sets, prefixes)
        save_report(self.output / REPORT, dataclasses.replace(report, fingerprint=self.key()))

    def _data_set(self, name: str, shards: Sequence[Path]) -> str:
        # Imported here because Megatron takes seconds to import.
        from megatron.bytescale.core.datasets import corpus

        entries = [entry for shard in shards for entry in file_entries(shard)]
        tokenizer = corpus.build_megatron_tokenizer(self.settings) if self.settings else None
        prefix = str(self.output / name)
        corpus.write_corpus(prefix, entries, tokenizer=tokenizer)
        return prefix


def _where(args: argparse.Namespace) -> Where:
    from bytescale_ext.data.clean.stages import Where

    workers = os.cpu_count() or 1 if args.workers is None else args.workers
    if workers < 1:
        raise ValueError(f"--workers {workers}: give 1 or more")
    options = tuple((key, value) for key, _, value in (one.partition("=") for one in args.slurm))
    if args.executor == "slurm" and "partition" not in dict(options):
        raise ValueError("--executor slurm: name the partition: --slurm partition=P")
    if args.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--executor ray: Ray is not installed: pip install ray")
    if (args.slurm and args.executor != "slurm") or (args.ray_address and args.executor != "ray"):
        raise ValueError("--slurm and --ray-address are for the --executor of that name")
    return Where(args.executor, workers, args.ray_address, options)


def show(output: Path, as_json: bool) -> None:
    """Print the report of a folder."""
    from bytescale_ext.data.clean.report import REPORT, load_report, text_of

    report: Report = load_report(output / REPORT)
    print((output / REPORT).read_text() if as_json else text_of(report))
