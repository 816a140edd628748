"""Every command of README, the docs and ``--help`` runs, page by page and in the order of the page.

Only sizes change. The commands of a page share a folder, so that a command finds the files of earlier commands. A
command that cannot run here has a row in ``ELSEWHERE`` with the reason. A new command must run or have a row.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import sysconfig
from pathlib import Path

import pytest

from megatron.bytescale import cli
from tests.e2e.corpora import VOCAB, write_documents
from tests.e2e.docs.pages import PAGES, ROOT, code_lines, small_training, with_values
from tests.e2e.training import MODEL, train
from tests.harness import run_ranks
from tests.sample import sampled

WALKTHROUGH = "tests/e2e/docs/test_walkthrough.py"
ELSEWHERE = {  # start of a command: the reason why it does not run here, or the test that runs it
    "make ": "they run the demo and this test",
    ".venv/bin/pre-commit ": "it changes the hooks of the repository",
    ".venv/bin/python -m pytest ": "they run this test",
    "bytescale corpus --from notes.jsonl ": WALKTHROUGH,
    "bytescale plan --lengths data/notes.idx ": WALKTHROUGH,
    "torchrun --nproc-per-node 2 -m megatron.bytescale.train --hybrid-data-parallel ": WALKTHROUGH,
    "bytescale generate --load runs/notes ": WALKTHROUGH,
    "bytescale data clean ": "tests/bytescale/cli/data/test_clean.py",
    "bytescale data mix ": "tests/bytescale/cli/data/test_mix.py",
    "bytescale convert --": "tests/bytescale/convert/test_folders.py",
    "bytescale dry-run ": "tests/bytescale/cli/shared/test_launch_line.py",
    "bytescale profile ": "tests/bytescale/cli/test_profile.py",
    "torchrun --nproc-per-node 4 pretrain_gpt_hdp.py --sculpt-windows ": "tests/e2e/hdp/test_sculpt.py",
    "sudo .venv/bin/python scripts/bench/cluster/learn_wall.py": "it needs root and 20 minutes",
    "bytescale corpus --sft ": "tests/bytescale/core/datasets/test_conversations.py",
    "torchrun --nproc-per-node 8 pretrain_gpt_hdp.py --sft ": "tests/e2e/hdp/test_sft.py",
    "scripts/recipes/models/": "tests/scripts/test_models.py",
    "DATA=data/mine TOKENIZER=": "tests/scripts/test_models.py",
    "bytescale experts ": "tests/bytescale/cli/experts/test_command.py",
    "bytescale generate ": "tests/bytescale/cli/generate/test_command.py",
    "bytescale draft export ": "tests/bytescale/cli/test_draft.py",
    "torchrun --nproc-per-node 2 --no-python bytescale generate ": "tests/bytescale/cli/generate/test_command.py",
    "bytescale logprobs ": "tests/e2e/hdp/test_logprobs.py",
    "torchrun --nproc-per-node 8 --no-python bytescale logprobs ": "tests/e2e/hdp/test_logprobs.py",
    "python -m scripts.bench.cluster.learn ": "tests/bench/cluster/test_learn.py",
    "python -m scripts.bench.cluster.learn_cost ": "tests/bench/cluster/test_learn_cost.py",
    "bytescale search ": "tests/bytescale/cli/search/test_command.py",
    "torchrun --nproc-per-node N --no-python bytescale profile ": "tests/test_demo.py",
    "ITERS=20000 scripts/train_slurm.sbatch ": "tests/scripts/test_bad_values.py",
    "ITERS=20000 sbatch ": "tests/e2e/runs/test_slurm.py",
    "SWEEP=sweep.txt sbatch ": "tests/e2e/runs/test_slurm.py",
    "torchrun --nproc-per-node 8 pretrain_gpt_hdp.py --load checkpoints/8k ": "tests/e2e/docs/test_recipes.py",
    "torchrun --nproc-per-node 8 pretrain_gpt_hdp.py ... --draft-heads ": "tests/e2e/hdp/test_drafts.py",
    "torchrun --nproc-per-node 8 pretrain_gpt_hdp.py ... --state-policy paged --state-host-gb 20 ": (
        "tests/e2e/states/test_paged.py"
    ),
    "torchrun --nproc-per-node 8 pretrain_gpt_hdp.py ... --state-policy paged --state-update-steps ": (
        "tests/e2e/states/test_lock_free.py"
    ),
    "torchrun --nproc-per-node 8 pretrain_gpt_hdp.py ... --num-experts 64 ": "tests/e2e/experts/test_placement.py",
}
SIZES = {
    "corpus": {"--tokens": "20000"},
    "plan": {"--num-sequences": "8"},
    "simulate": {"--seq-length": "64K", "--ranks": "8", "--global-tokens": "256K", "--seeds": "1"},
    "memory-plan": {"--seq-length": "64"},
    "ngram": {"--rows": "64K"},
}
# A tokenizer of numbers needs no file. Few ranks, and no context parallelism, which needs a GPU.
TRAINING = {
    "--tokenizer-type": "NullTokenizer", "--context-parallel-size": "1", "--pipeline-model-parallel-size": "2",
    "--host-memory-gb": "1",
}  # fmt: skip
MAX_RANKS = 2
# Values for the placeholders that a reader of a page replaces.
FIXED_LENGTH = [
    *MODEL, "--data-path", "data/text_document", "--split", "99,1,0", "--micro-batch-size", "1",
    "--global-batch-size", "8", "--train-iters", "2", "--lr", "1e-3", "--eval-interval", "1000",
]  # fmt: skip
HDP = ["--hybrid-data-parallel", "--hdp-tokens-per-rank", "256"]
FILLED_IN = {
    "$TRAINING_FLAGS": shlex.join(FIXED_LENGTH), '"$MODEL_FLAGS"': shlex.quote(shlex.join(MODEL)),
    "--hybrid-data-parallel ...": shlex.join([*HDP, *FIXED_LENGTH]), "...": shlex.join(FIXED_LENGTH),
}  # fmt: skip


def examples() -> list[str]:
    """Return the commands in the examples of ``--help``."""
    return [
        line for command in cli.COMMANDS for line in re.findall(r"\b(?:bytescale|torchrun) [^;()]*", command.EXAMPLE)
    ]


COMMANDS = {**{str(page.relative_to(ROOT)): code_lines(page.read_text()) for page in PAGES}, "--help": examples()}


LONG_PAGES = (
    "--help", "docs/guide/activations.md", "docs/guide/data.md", "docs/guide/ngram.md", "docs/guide/slices.md",
    "docs/guide/states.md", "docs/guide/training.md",
)  # fmt: skip
"""Pages whose commands run in `make test-all` only: each command has a test of its own."""


def is_elsewhere(line: str) -> bool:
    return any(" ".join(line.split()).startswith(start) for start in ELSEWHERE)


def test_reasons_are_needed_and_tests_exist() -> None:
    lines = [" ".join(line.split()) for lines in COMMANDS.values() for line in lines]
    assert len(lines) > 35
    for start, reason in ELSEWHERE.items():
        assert any(line.startswith(start) for line in lines), f"no page has {start}"
        assert not reason.startswith("tests/") or (ROOT / reason).is_file()


WRITTEN = ("--output", "--plot", "--save", "--hdp-log-dir", "--record-memory-plan", "--moe-placement-trace", ">")
IGNORED = ("runs/", "data/", "checkpoints/", "/")
"""Folders that git ignores, and other places."""


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_write_nothing_beside_the_sources(page: str) -> None:
    for line in COMMANDS[page]:
        words = shlex.split(line, comments=True)
        for word, value in itertools.pairwise(words):
            assert word not in WRITTEN or value.startswith(IGNORED), line
    assert set(IGNORED[:-1]) <= {f"{name[1:]}" for name in (ROOT / ".gitignore").read_text().split()}


def write_inputs(folder: Path) -> None:
    """Write the files that the pages assume."""
    for name in ("lib/site-packages", "texts", "data"):
        (folder / name).mkdir(parents=True)
    for number in range(20):
        (folder / "lib" / "site-packages" / f"{number}.py").write_text("x" * 40 * (number + 1))
    (folder / "texts" / "one.txt").write_text("one")
    (folder / "more.jsonl").write_text('{"text": "two"}\n')
    write_documents(folder / "data" / "text_document", copies=5)
    (folder / "corpus_text_document.idx").symlink_to(folder / "data" / "text_document.idx")
    shard = {"seq": 0, "length": 9, "tokens": 9, "ring": [0]}
    span = {"step": 12, "rank": 0, "kind": "forward", "micro_batch": 0, "start": 0, "stop": 1, "shards": [shard]}
    for run in ("run", "runs/demo"):
        (folder / run / "timeline").mkdir(parents=True)
        (folder / run / "timeline" / "rank0.jsonl").write_text(json.dumps(span) + "\n")


def run_console(rank: int, world: int, folder: str, words: list[str]) -> tuple[int, str, str]:
    """Return (exit code, standard output, standard error) of ``bytescale`` in a folder, with a small environment."""
    os.chdir(folder)
    library = f"{folder}/lib"
    ours = {"stdlib": library, "purelib": f"{library}/site-packages", "platlib": f"{library}/site-packages"}
    places = {**sysconfig.get_paths(), **ours}
    sysconfig.get_paths = lambda *_: places  # type: ignore[assignment]
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = cli.main(words)
    return code, printed.getvalue(), errors.getvalue()


def run_training(words: list[str], folder: Path) -> None:
    """Run two training steps of a launch line on at most ``MAX_RANKS`` ranks, and evaluate."""
    script = next(place for place, word in enumerate(words) if word.endswith((".py", "bytescale.train", "train")))
    ranks = int(words[2]) if words[0] == "torchrun" else 1
    files = {"--data-path": str(folder / "data" / "text_document")}
    files |= {flag: str(folder / "plan.json") for flag in ("--record-memory-plan", "--memory-plan")}
    flags = small_training(words[script + 1 :], {**TRAINING, **files})
    if "--tokenizer-model" in flags:
        place = flags.index("--tokenizer-model")
        flags[place : place + 2] = ["--vocab-size", str(VOCAB)]
    outcome = train(min(ranks, MAX_RANKS), *flags, "--log-interval", 1, "--eval-iters", 1)
    assert outcome.code is None, shlex.join(words)
    assert len(outcome.losses) == int(flags[flags.index("--train-iters") + 1])
    assert outcome.validation_losses


def words_of(command: str) -> list[str]:
    """Return the words of a command, with values for its placeholders."""
    for gap, flags in FILLED_IN.items():
        command = command.replace(gap, flags)
    return shlex.split(command, comments=True)


@pytest.mark.ranks
@pytest.mark.parametrize("page", sampled(COMMANDS, [page for page in COMMANDS if page not in LONG_PAGES]))
def test_commands_run(page: str, tmp_path: Path) -> None:
    lines = [line for line in COMMANDS[page] if not is_elsewhere(line)]
    if lines:
        write_inputs(tmp_path)
    for line in lines:
        command, _, to_file = line.partition(" > ")
        words = words_of(command)
        if words[0] == "torchrun" or words[:2] == ["bytescale", "train"]:
            run_training(words, tmp_path)
            continue
        assert words[0] == "bytescale", f"{line}: run it here, or say in ELSEWHERE why not"
        sizes = SIZES.get(words[1], {})
        code, printed, errors = run_ranks(
            run_console, 1, str(tmp_path), with_values(words[1:], sizes), init_group=False
        )[0]
        assert code == 0, f"{line}: {errors}"
        if to_file:
            (tmp_path / shlex.split(to_file)[0]).write_text(printed)
