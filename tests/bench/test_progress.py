"""Progress of a bench: every part is yielded, and named on stderr when it ends."""

from __future__ import annotations

import pytest

from scripts.bench.progress import progress


def test_a_line_for_each_finished_part(capsys: pytest.CaptureFixture[str]) -> None:
    parts = progress([3, 5], lambda part: f"width {part}")
    assert next(parts) == 3
    assert capsys.readouterr().err == ""
    assert list(parts) == [5]
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["1/2 width 3: 0 s", "2/2 width 5: 0 s"]
    assert printed.out == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(progress(["first", "second"])) == ["first", "second"]
    err = capsys.readouterr().err
    assert "second" in err
    assert "2/2" in err
