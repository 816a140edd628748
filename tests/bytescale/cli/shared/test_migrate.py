"""Megatron launch lines, changed so that they train with hybrid data parallelism."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.bytescale.cli.shared.migrate import LineChange, Migration, changes_text, migrate
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[4]
MODEL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 1024 --attention-dropout 0"
START = "torchrun --nnodes 2 --nproc-per-node=4 path/pretrain_gpt.py"
LINES = {
    "batch": f"{START} {MODEL} --global-batch-size 12 --tensor-model-parallel-size 1",
    "sequence parallel": (
        f"{START} {MODEL} --global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size=3 --train-iters 10"
    ),
    "replaced": f"{START} {MODEL} --global-batch-size 8 --use-megatron-fsdp --hybrid-context-parallel",
    "a second change": f"{START} {MODEL} --global-batch-size 8 --num-experts 4 --tensor-model-parallel-size 2 "
    "--disable-bias-linear",
    "dropped": f"{START} {MODEL} --global-batch-size 8 --enable-cuda-graph --odd 1 2 --max-seqlen-per-dp-cp-rank 9",
    "decision": f"{START} {MODEL} --global-batch-size 8 --fim-data --micro-batch-size 4",
    "a weighted blend": f"{START} {MODEL} --global-batch-size 8 --data-path 0.5 a 0.5 b --train-samples 80",
    "nothing but flags": f"{MODEL} --global-batch-size 8",
    "missing": "--num-layers 2 --hidden-size 8 --num-attention-heads 2",
    "left to the checks": f"{START} {MODEL} --global-batch-size 8 --tensor-model-parallel-size 3",
    "ours already": f"{START} {MODEL} --global-batch-size 8 --hybrid-data-parallel --hdp-tokens-per-rank 256",
    "variable": f"{START} {MODEL} --global-batch-size $BATCH",
    "settings in a file": f"{START} {MODEL} --global-batch-size 8 --yaml-cfg=settings.yaml",
    "quotes": "torchrun pretrain_gpt.py 'a",
    "script": "torchrun --nproc-per-node 8 pretrain_mamba.py --num-layers 2",
    "no command": "make test",
}


def ask(rank: int, world: int, lines: Sequence[str]) -> list[Migration | str]:
    """Return the changed lines, or their errors."""
    found: list[Migration | str] = []
    for line in lines:
        try:
            found.append(migrate(line))
        except ValueError as error:
            found.append(str(error))
    return found


def readme_lines() -> tuple[str, str]:
    """Return the two launch lines of the README: before and after."""
    part = (ROOT / "README.md").read_text().split("## Move a launch line over")[1]
    before, after = re.findall(r"```bash\n(torchrun .*?)```", part, re.DOTALL)[:2]
    return before, after


@pytest.fixture(scope="module")
def found() -> dict[str, Migration | str]:
    before, after = readme_lines()
    lines = {**LINES, "README before": before, "README after": after}
    answers: list[Migration | str] = run_ranks(ask, 1, list(lines.values()), init_group=False)[0]
    again = [shlex.join(one.line) for one in answers if isinstance(one, Migration) and one.runs]
    for line, one in zip(again, run_ranks(ask, 1, again, init_group=False)[0], strict=True):
        assert isinstance(one, Migration)
        assert (shlex.join(one.line), one.changes) == (line, ()), "a changed line is changed again"
    return dict(zip(lines, answers, strict=True))


def of(found: dict[str, Migration | str], name: str) -> Migration:
    one = found[name]
    assert isinstance(one, Migration), one
    return one


def flags(one: Migration) -> list[str]:
    """Return the flags with their values, sorted."""
    words = " ".join(one.line).split(".py", 1)[-1]
    return sorted(word.strip() for word in re.split(r"(?:^| )(?=--)", words) if word.strip())


def test_the_line_of_the_readme_becomes_the_other(found: dict[str, Migration | str]) -> None:
    before, after = of(found, "README before"), of(found, "README after")
    assert before.runs
    assert after.changes == ()
    ours = {one for one in flags(before) if "batch-size" not in one and "global-tokens" not in one}
    wanted = {one for one in flags(after) if "batch-size" not in one and "global-tokens" not in one}
    assert ours - wanted == {"--calculate-per-token-loss"}, "set by itself, and harmless"
    assert wanted <= ours
    assert f"--hdp-global-tokens {16 * 32768}" in flags(before)
    assert before.device_gb is not None
    assert before.device_gb == after.device_gb, "both lines train the same model in the same way"


# name: flags that the line then has, flags that are removed
CHANGED = {
    "batch": ("--global-batch-size 16|--hdp-global-tokens 12288|--hdp-tokens-per-rank 1024", ""),
    "sequence parallel": (
        "--hdp-tokens-per-rank 342|--hdp-global-tokens 8192",
        "--context-parallel-size",
    ),
    "replaced": ("--use-distributed-optimizer", "--use-megatron-fsdp|--hybrid-context-parallel"),
    "a second change": ("--sequence-parallel|--hybrid-data-parallel", ""),
    "dropped": ("--hdp-tokens-per-rank 1024", "--enable-cuda-graph|--odd|--max-seqlen-per-dp-cp-rank"),
    "nothing but flags": ("--hybrid-data-parallel", "--micro-batch-size"),
    "ours already": ("--hdp-tokens-per-rank 256|--global-batch-size 8", "--hdp-global-tokens"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_can_be_changed_is(name: str, found: dict[str, Migration | str]) -> None:
    one = of(found, name)
    there, gone = CHANGED[name]
    assert one.runs, one.changes
    assert set(there.split("|")) <= set(flags(one))
    names = {word.split()[0] for word in flags(one)}
    assert not names & set(gone.split("|"))
    assert all(change.why and "\n" not in change.why for change in one.changes)
    if "pretrain_gpt" in " ".join(one.line):
        assert "pretrain_gpt_hdp.py" in one.line


def test_units_that_change_are_named_and_weights_keep_their_meaning(found: dict[str, Migration | str]) -> None:
    migration = of(found, "a weighted blend")
    means = {change.flag: change.why for change in migration.changes if change.what == "means"}
    assert list(means) == ["--global-batch-size", "--train-samples", ""]
    assert means["--train-samples"] == "documents of the training"
    assert migration.line[-2:] != ("--hdp-blend-by", "documents")
    assert "--hdp-blend-by tokens" in " ".join(migration.line)
    assert not [change for change in of(found, "ours already").changes if change.what == "means"]


def test_what_needs_a_decision_is_marked(found: dict[str, Migration | str]) -> None:
    one = of(found, "decision")
    assert not one.runs
    assert [change.flag for change in one.changes if change.what == "decide"] == ["--fim-data"]
    assert "--fim-data" in one.line
    assert "--micro-batch-size" not in one.line
    assert "not yet: decide as marked" in changes_text(one)
    assert one.device_gb is None
    assert of(found, "nothing but flags").device_gb is None, "the number of processes is unknown"
    missing = [change.flag for change in of(found, "missing").changes if change.what == "decide"]
    assert missing == ["--seq-length", "--global-batch-size"]
    (checked,) = [change for change in of(found, "left to the checks").changes if change.what == "decide"]
    assert "8 processes cannot be divided among --tensor-model-parallel-size 3" in checked.why


BAD = {
    "variable": "give the words with values, without variables of a shell",
    "settings in a file": "--yaml-cfg does not work here: give the flags on the command line",
    "quotes": "--launch: not a command line",
    "script": "--launch: pretrain_mamba.py is another script",
    "no command": "--launch: give a command such as",
}


@pytest.mark.parametrize("name", BAD)
def test_other_lines_are_refused(name: str, found: dict[str, Migration | str]) -> None:
    assert BAD[name] in str(found[name])
    assert isinstance(found[name], str)
    assert "\n" not in str(found[name])


def commands(rank: int, world: int, calls: list[list[str]]) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each call of ``bytescale doctor --cpu``."""
    from megatron.bytescale.cli import main

    found = []
    for words in calls:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(["doctor", "--cpu", *words])
        found.append((code, out.getvalue(), errors.getvalue()))
    return found


def test_the_command_prints_changes_and_line() -> None:
    calls = [["--launch", LINES["batch"]], ["--launch", LINES["decision"], "--json"], ["--launch", LINES["script"]]]
    changed, undecided, refused = run_ranks(commands, 1, calls, init_group=False)[0]
    assert changed[0] == 0
    assert changed[1].splitlines()[0].startswith("replace  pretrain_gpt.py -> pretrain_gpt_hdp.py ")
    assert changed[1].splitlines()[-1].startswith("torchrun --nnodes 2 --nproc-per-node=4 pretrain_gpt_hdp.py ")
    assert changed[1].splitlines()[-4].startswith("forecast memory of the fullest device: ")
    assert changed[1].splitlines()[-4].endswith(" GB, for a vocabulary of 32,000")
    assert undecided[0] == 1
    shown = json.loads(undecided[1])
    assert LineChange(**shown["changes"][-1]).what == "decide"
    assert shown["line"][0] == "torchrun"
    assert (refused[0], refused[1], refused[2].count("\n")) == (2, "", 1)
