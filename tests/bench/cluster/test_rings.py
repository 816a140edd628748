"""The measurement of hierarchical rings without a cluster: order of runs, what it reads of them, its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.cluster import rings
from scripts.cluster.topology import Topology


def bench_of(folder: Path) -> rings.Bench:
    return rings.Bench(folder, Topology(2, 4, name="rings"), tokens=64, num_steps=3, repeats=2)


def test_steps_are_read_from_the_log_without_the_first() -> None:
    lines = [f"iteration {i}/3 | elapsed time per iteration (ms): {i}500.0 | lm loss: {i}.25E+00 |" for i in (1, 2, 3)]
    assert rings.read_steps("\n".join(lines)) == ([2.5, 3.5], [2.25, 3.25])


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the cluster; return the forms that trained. Hierarchical rings take half the time."""
    ran: list[str] = []

    def train(bench: rings.Bench, form: str, number: int) -> tuple[list[float], list[float]]:
        ran.append(form)
        return [2.0 if form == "plain" else 1.0], [5.0]

    monkeypatch.setattr(rings, "train", train)
    monkeypatch.setattr(rings, "preload", lambda: None)
    passes = {"plain": [6.0, 12.0], "hierarchical": [2.0, 3.0]}
    monkeypatch.setattr(rings, "exchange_seconds", lambda bench: passes)
    return ran


def test_forms_take_turns_and_are_compared(tmp_path: Path, order: list[str]) -> None:
    found = rings.measure(bench_of(tmp_path), 2)
    assert order == ["plain", "hierarchical", "hierarchical", "plain"]
    assert found["exchange"] == {"plain": 18.0, "hierarchical": 5.0, "ratio": 3.6}
    assert [found[name]["ratio"] for name in ("forward", "backward", "step")] == [3.0, 4.0, 2.0]
    assert rings.report(found).splitlines()[-1].split() == ["training", "step", "2.000", "1.000", "2.00"]


def test_other_losses_are_an_error(tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "train", lambda bench, form, number: ([1.0], [5.0 if form == "plain" else 5.1]))
    with pytest.raises(RuntimeError, match="losses of plain and hierarchical rings differ"):
        rings.measure(bench_of(tmp_path), 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--steps 1", "give 2 steps"),
        ("--ranks-per-node 1", "2 ranks of a node"),
        ("--tokens 1001", "--tokens 1001 is not a multiple of the 8 ranks"),
        ("--inter-gbps -1", "must not be negative"),
    ],
)
def test_bad_input_is_one_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rings.py", *words.split()])
    assert rings.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
