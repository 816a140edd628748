"""``bytescale data clean``: filter, mask and deduplicate all sources of a corpus with datatrove."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bytescale_ext.data.clean.recipe import FILTERS, ON_BAD, POLICIES, STEPS, Recipe, read_recipe
from bytescale_ext.data.samples.sources import file_entries
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import stored_text
from bytescale_ext.new_file import make_own_folder, new_file, write_text
from megatron.bytescale.cli.data.executors import add_executor, check_datatrove, executor_settings
from megatron.bytescale.cli.shared.inputs import check_apart
from megatron.bytescale.cli.shared.options import add_json
from megatron.bytescale.cli.shared.tokenizer import add_tokenizer_arguments, tokenizer_settings

if TYPE_CHECKING:
    from bytescale_ext.data.clean.report import Report

NAME = "clean"
HELP = "filter, mask and deduplicate the sources of a corpus, with a report; a killed run resumes"
EXAMPLE = "bytescale data clean --input docs=texts --steps pii exact near --tokenize --output data/cleaned"

_WORK: Final = ".work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale data clean``."""
    parser.add_argument(
        "--recipe", type=Path, metavar="F.toml", help="sources and settings; options replace its values"
    )
    parser.add_argument(
        "--input", nargs="+", default=[], metavar="NAME=PATH", help="sources: files, or folders of text files"
    )
    parser.add_argument("--trust-recipe", action="store_true", help="run the code that the steps of the recipe name")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="write NAME/*.jsonl and report.json")
    parser.add_argument("--steps", nargs="*", choices=STEPS, help="cleaning steps (default: all)")
    parser.add_argument("--filters", nargs="*", choices=FILTERS, help="quality filters of all sources")
    parser.add_argument("--jaccard", type=float, metavar="J", help="least similarity of near-duplicates (0.8)")
    parser.add_argument(
        "--policy", choices=POLICIES, help="keep one document of a cluster (drop), or keep one with a weight (weight)"
    )
    parser.add_argument(
        "--on-bad", choices=ON_BAD, help="broken lines, binary files and equal ids: count them (skip) or fail"
    )
    parser.add_argument("--text-key", metavar="KEY", help="key or column of the text (text)")
    add_executor(parser, "tasks of the work; they do not change the result (one for each file, up to 32)")
    parser.add_argument("--tokenize", action="store_true", help="also write NAME.bin and NAME.idx")
    add_json(parser)
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Clean the corpus, or resume an unfinished run, and print the report.

    Raises:
        ValueError: an option, the recipe, a source or a document is bad, or a task has failed.
    """
    check_datatrove()
    fields = ("steps", "filters", "jaccard", "policy", "on_bad", "text_key", "tasks")
    recipe = read_recipe(args.recipe, args.input, {name: getattr(args, name) for name in fields})
    finish = Finish(recipe, args.output, tokenizer_settings(args), args.tokenize)
    where = executor_settings(args)
    check_apart(args.output, folders=[source.path for source in recipe.sources])
    if finish.settings and not args.tokenize:
        raise ValueError("--tokenizer-type needs --tokenize")
    if recipe.own and not args.trust_recipe:
        from bytescale_ext.data.clean.own import check_needs_no_trust

        check_needs_no_trust(recipe)
    done = begin(finish)
    if not done:
        from bytescale_ext.data.clean.own import check_own_steps
        from bytescale_ext.data.clean.readers import check_packages
        from bytescale_ext.data.clean.stages import stages_of
        from bytescale_ext.data.tasks.stages import run_stages

        check_packages(recipe)
        check_own_steps(recipe)
        run_stages(stages_of(recipe, finish.work, finish, args.memory_gb), finish.work, where)
        if args.executor == "slurm" and not (args.output / "report.json").exists():
            print(f"submitted; the last job writes {one_line(args.output / 'report.json')}")
            return 0
        shutil.rmtree(finish.work)
    show(args.output, args.json)
    return 0


def begin(finish: Finish) -> bool:
    """Return whether the output is finished; else make the work folder, or keep the folder of an unfinished run.

    Raises:
        ValueError: the folder has output, or unfinished work, of another recipe, or other files.
        OSError: the work folder belongs to another user or has links.
    """
    from bytescale_ext.data.clean.report import REPORT, load_report

    own, noted = finish.key(), finish.work / "recipe"
    own_work = f"{own} {finish.recipe.tasks} tasks"
    other, advice = "another recipe, or of files that have changed", "give another --output or remove the folder"
    if (finish.output / REPORT).exists():
        if load_report(finish.output / REPORT).fingerprint != own:
            raise ValueError(f"--output {finish.output}: it holds the output of {other}: {advice}")
        return True
    if noted.exists():
        make_own_folder(finish.work)
        if stored_text(noted) != own_work:
            raise ValueError(
                f"--output {finish.output}: it holds unfinished work of {other}, or with other --tasks: {advice}"
            )
        return False
    if finish.output.exists() and any(finish.output.iterdir()):
        raise ValueError(f"--output {finish.output}: this folder has other files: give another folder")
    make_own_folder(finish.work)
    write_text(noted, own_work)
    return False


@dataclass(frozen=True)
class Finish:
    """The last step: it renames the shards, writes data sets from them, and writes the report.

    Attributes:
        recipe: recipe of the corpus.
        output: folder of the output.
        settings: settings of the tokenizer; without any, a token is a byte.
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
        """Return the text that identifies this output."""
        return json.dumps([self.recipe.fingerprint(), self.tokenize, self.settings])

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the missing files."""
        from bytescale_ext.data.clean.output import gather
        from bytescale_ext.data.clean.report import REPORT, make_report, save_report
        from bytescale_ext.data.clean.settle import duplicates_path

        sets = gather(self.recipe, self.work, self.output)
        prefixes = (
            {data_set.name: self._data_set(data_set.name, data_set.shards) for data_set in sets}
            if self.tokenize
            else {}
        )
        with new_file(self.output / "duplicates.jsonl") as stream:
            for task in range(self.recipe.tasks):
                with duplicates_path(self.work, task).open(encoding="utf-8") as lines:
                    stream.writelines(lines)
        report = make_report(self.recipe, self.work, sets, prefixes)
        save_report(self.output / REPORT, dataclasses.replace(report, fingerprint=self.key()))

    def _data_set(self, name: str, shards: Sequence[Path]) -> str:
        # Megatron takes seconds to import, so errors come first.
        from megatron.bytescale.core.datasets import corpus

        entries = [entry for shard in shards for entry in file_entries(shard)]
        tokenizer = corpus.build_megatron_tokenizer(self.settings) if self.settings else None
        prefix = str(self.output / name)
        corpus.write_corpus(prefix, entries, tokenizer=tokenizer)
        return prefix


def show(output: Path, as_json: bool) -> None:
    """Print the report of an output folder."""
    from bytescale_ext.data.clean.report import REPORT, load_report, text_of

    report: Report = load_report(output / REPORT)
    print((output / REPORT).read_text() if as_json else text_of(report))
