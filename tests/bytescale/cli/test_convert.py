"""`bytescale convert`: invalid combinations of flags, with one error line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.bytescale.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --from --to is required"),
        (["--from", "hf", "--load", "a"], "--from hf needs --input, and no --load"),
        (["--to", "hf", "--input", "a", "--load", "a"], "--to hf needs --load, and no --input"),
        (["--to", "hf", "--load", "a", "--dtype", "bf16"], "--dtype needs --from"),
    ],
)
def test_flags_that_do_not_go_together(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *words, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()
