"""The driver of Megatron's own unit tests, with small files of tests in place of Megatron's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ghost.devices import needs_ghosts
from tests.ghost.peer_tests import (
    CUT,
    FAILED,
    PASSED,
    SKIPPED,
    Outcome,
    Results,
    Run,
    differences,
    files_of,
    main,
    outcomes_of,
    table,
)

FILE = "tests/unit_tests/part/test_one.py"
RANK_0: list[dict[str, object]] = [
    {"tests": ["a", "b", "c", "d"]},
    {"test": "a", "outcome": "began"},
    {"test": "a", "outcome": "passed", "reason": ""},
    {"test": "b", "outcome": "skipped", "reason": "no GPU"},
    {"test": "c", "outcome": "began"},
]
RANK_1: list[dict[str, object]] = [
    {"tests": ["a", "b", "c", "d"]},
    {"test": "a", "outcome": "failed", "reason": "E  x\n y"},
]


def written(folder: Path, *ranks: list[dict[str, object]]) -> Path:
    for rank, lines in enumerate(ranks):
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_worst_rank_counts(tmp_path: Path) -> None:
    written(tmp_path, RANK_0, RANK_1)
    one = outcomes_of(Run(FILE, 1, ""), tmp_path)
    assert {name: found.outcome for name, found in one.items()} == {"a": PASSED, "b": SKIPPED, "c": CUT, "d": CUT}
    assert one["c"].reason == "did not end"
    two = outcomes_of(Run(FILE, 2, ""), tmp_path)
    assert two["a"] == Outcome(FAILED, "E x y")
    assert outcomes_of(Run(FILE, 3, ""), tmp_path)[FILE].outcome == CUT


def test_differences_are_named_and_counted() -> None:
    plain, ours, late = Run(FILE, 1, ""), Run(FILE, 1, "documents"), Run(FILE, 2, "")
    before = {"a": Outcome(PASSED), "b": Outcome(FAILED, "needs a package")}
    results = Results({plain: before, ours: {**before, "a": Outcome(FAILED, "our row")}}, [late])
    assert differences(results) == ["a, 1 ranks, documents: passed -> failed: our row"]
    text = table(results, ("", "documents"))
    assert "| `part` | 1 | none: unpatched | 1 | 1 | 0 | 0 |" in text
    assert "| `part` | 1 | documents | 0 | 2 | 0 | 0 |" in text
    assert "- 1: failed: needs a package" in text
    assert f"{FILE} (2)" in text
    assert not differences(Results({plain: before, ours: before}, []))


def test_names_without_tests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tests"):
        files_of(tmp_path, ["missing"])


@pytest.mark.ranks
@pytest.mark.full
@needs_ghosts
def test_a_tree_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks reduce on ghost GPUs with and without rows; a test that sees a row of ours is a difference."""
    folder = tmp_path / "tree" / "tests" / "unit_tests"
    folder.mkdir(parents=True)
    for part in (folder, folder.parent):
        (part / "__init__.py").touch()
    (folder / "test_sum.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "def test_sum():\n"
        "    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "    dist.init_process_group('nccl')\n"
        "    one = torch.ones(3, device='cuda')\n"
        "    dist.all_reduce(one)\n"
        "    assert one.tolist() == [2.0] * 3\n"
        "def test_row():\n"
        "    from megatron.training import training\n"
        "    assert not hasattr(training.training_log, '__wrapped__')\n"
    )
    words = [str(tmp_path / "tree"), "--only", "test_sum.py", "--ranks", "2", "--output", str(tmp_path / "out")]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "| `test_sum.py` | 2 | none: unpatched | 2 | 0 | 0 | 0 |" in printed
    assert "| `test_sum.py` | 2 | documents | 1 | 1 | 0 | 0 |" in printed
    assert "Tests whose outcome differs: 1." in printed
    assert main(words) == 1  # read, not run
    assert "1/2" not in capsys.readouterr().out
