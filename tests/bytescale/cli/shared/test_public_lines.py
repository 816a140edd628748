"""Public launch lines: the changes of `bytescale doctor --launch`, and runs of the printed lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.bytescale.cli.shared.migrate import Migration, migrate
from tests.bytescale.cli.shared.public_lines import LINES, USUAL
from tests.bytescale.cli.shared.test_migrate import ask, of
from tests.e2e.corpora import VOCAB, write_documents
from tests.e2e.training import train
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

SIGNS = {"remove": "-", "add": "+", "replace": "=", "decide": "?"}
# Flags that a user removes who trains a line on CPU, with documents, and without the settings that HDP refuses.
NOT_HERE = """
--train-samples --lr-decay-samples --lr-warmup-samples --rampup-batch-size --step-batch-size-schedule --mock-data
--tokenizer-type --tokenizer-model --vocab-size --fp8-format --fp8-param-gather --fp8-amax-history-len
--fp8-amax-compute-algo --use-checkpoint-args --fim-data --pipeline-model-parallel-layout
--hybrid-layer-pattern --spec --mamba-num-heads --num-distributed-optimizer-instances
--fine-grained-activation-offloading --offload-modules --sft --save --load --train-iters --no-load-optim
""".split()
SMALL = (
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --train-iters 4 --lr 1e-3 --eval-iters 0 --split 100,0,0 "
    "--log-interval 1 --save-interval 2 --num-workers 0 --no-one-logger --init-method-std 0.2"
).split()
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4".split()


def launch(name: str) -> str:
    """Return the launch line."""
    line = LINES[name]
    return f"torchrun --nproc-per-node {line.processes} pretrain_gpt.py {line.flags}"


@pytest.fixture(scope="module")
def found() -> dict[str, Migration | str]:
    answers: list[Migration | str] = run_ranks(ask, 1, [launch(name) for name in LINES], init_group=False)[0]
    return dict(zip(LINES, answers, strict=True))


def test_the_table_is_long() -> None:
    assert len(LINES) >= 32


@pytest.mark.parametrize("name", LINES)
def test_changes_and_decisions(name: str, found: dict[str, Migration | str]) -> None:
    one = of(found, name)
    changes = [(SIGNS[change.what], change.flag.split()[0] if change.flag else "") for change in one.changes
               if change.what != "means" and ".py" not in change.flag]  # fmt: skip
    marks = [f"{sign} {flag}".strip() for sign, flag in changes if flag not in USUAL]
    assert ", ".join(marks) == LINES[name].changes
    assert one.runs == ("?" not in LINES[name].changes)
    assert all(change.why and "\n" not in change.why for change in one.changes)
    assert (one.device_gb is not None) == one.runs


@pytest.mark.parametrize("name", LINES)
def test_the_printed_line_changes_nothing_else(name: str, found: dict[str, Migration | str]) -> None:
    """Each flag of the printed line is in the original line, or a change adds it."""
    one = of(found, name)
    given = set(re.findall(r"--[\w-]+", launch(name)))
    added = {word for change in one.changes if change.what in ("add", "replace")
             for word in re.findall(r"--[\w-]+", change.flag)}  # fmt: skip
    words = one.line[one.line.index("pretrain_gpt_hdp.py") + 1 :]
    assert {word for word in words if word.startswith("--")} <= given | added


def on_cpu(name: str, corpus: Path, save: Path) -> list[str]:
    """Return the flags of the line that the doctor prints for a CPU, with the user's decisions."""
    words = shlex.split(LINES[name].flags)
    kept: list[str] = []
    is_kept = True
    for word in words:
        is_kept = word not in NOT_HERE if word.startswith("--") else is_kept
        kept += [word] if is_kept else []
    kept += [word for flag, value in zip(MODEL[::2], MODEL[1::2], strict=True) if flag not in kept
             for word in (flag, value)]  # fmt: skip
    kept = [word if word != "sinkhorn" else "none" for word in kept]
    kept += [*SMALL, "--data-path", str(corpus), "--save", str(save), "--load", str(save)]
    line = f"torchrun --nproc-per-node {LINES[name].processes} pretrain_gpt.py {shlex.join(kept)}"
    one = run_ranks(ask_on_cpu, 1, line, init_group=False)[0]
    assert one.runs, one.changes
    return list(one.line[4:])


def ask_on_cpu(rank: int, world: int, line: str) -> Migration:
    return migrate(line, on_cpu=True)


@pytest.mark.full
@pytest.mark.parametrize("name", LINES)
def test_the_line_trains_and_resumes(name: str, tmp_path: Path) -> None:
    write_documents(tmp_path / "docs")
    words = on_cpu(name, tmp_path / "docs", tmp_path / "save")
    ranks = LINES[name].processes
    first = train(ranks, *words, "--exit-interval", 2)
    assert not first.code, first.text[-2000:]
    assert len(first.losses) == 2
    second = train(ranks, *words)
    assert not second.code, second.text[-2000:]
    assert len(second.losses) == 2, "iterations 3 and 4"
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
