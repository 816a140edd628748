"""``pretrain_gpt_hdp.py --help`` prints all flags, Megatron's and ours."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys

import pytest

from megatron.bytescale.arguments.parse import add_arguments, escape_percent_signs
from tests.harness import run_ranks


def print_help(rank: int, world: int) -> tuple[int, str]:
    """Return the exit code and the text."""
    import pretrain_gpt_hdp

    sys.argv = ["pretrain_gpt_hdp.py", "--help"]
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            pretrain_gpt_hdp.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, text.getvalue()


@pytest.mark.ranks
def test_help_has_every_flag() -> None:
    ((code, text),) = run_ranks(print_help, 1, init_group=False)
    assert code == 0
    assert "--num-layers" in text
    titles = [line for line in text.splitlines() if line and line[0] != " " and line.endswith(":")]
    ours_first = [title.startswith("bytescale: ") for title in titles]
    assert ours_first == sorted(ours_first, reverse=True)
    assert 5 < sum(ours_first) < len(titles)
    assert text.splitlines()[0] == "usage: pretrain_gpt_hdp.py FLAGS (--help lists them)"
    words = text.split()
    ours = add_arguments(argparse.ArgumentParser(add_help=False))
    assert [flag for action in ours._actions for flag in action.option_strings if flag not in words] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [("10%).", "10%)."), ("50%% of it", "50% of it"), ("by 3 % (%(default)s)", "by 3 % (7)"), ("plain", "plain")],
)
def test_percent_signs_are_printed(text: str, shown: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", default=7, help=text)
    escape_percent_signs(parser)
    assert shown in parser.format_help()
