from __future__ import annotations

import contextlib
import io
import json

import pytest

from tests.harness import preload, run_ranks


@pytest.fixture(scope="module", autouse=True)
def megatron_in_the_fork_server() -> None:
    preload("tests.e2e.preload")


def ask(rank: int, world: int, words: list[str], foreign: bool) -> tuple[int, str, str]:
    """Exit code, output and errors of ``bytescale WORDS``; ``foreign``: with another ``training_log`` in Megatron."""
    import megatron.training.training

    from megatron.bytescale.cli import main

    if foreign:
        megatron.training.training.training_log = ask
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(words)
    return code, out.getvalue(), errors.getvalue()


def doctor(*words: str, foreign: bool = False) -> tuple[int, str, str]:
    return run_ranks(ask, 1, ["doctor", "--cpu", *words], foreign, init_group=False)[0]


def test_text() -> None:
    code, out, _ = doctor("--head-dim", "64")
    assert code == 0
    for words in (
        "python     3.",
        "megatron-core        0.19.2",
        "flash-attn           ",
        "device     cpu",
        "backend    gloo (--cpu was given)",
        "attention  cpu_flash for fp32, head width 64 (the first of the table",
        "not torch_flash: runs on cuda, not on cpu",
        "get_forward_backward_func        untouched",
        "training_log                     untouched",
    ):
        assert words in out


def test_json_says_the_same() -> None:
    code, out, _ = doctor("--json", "--dtype", "bf16", "--head-dim", "32")
    assert code == 0
    report = json.loads(out)
    assert report["packages"]["megatron-core"] == "0.19.2"
    assert report["device"] == "cpu" and report["backend"] == "gloo"
    attention = report["attention"]
    assert (attention["kernel"], attention["dtype"], attention["head_dim"]) == ("cpu_flash", "bf16", 32)
    assert "flash_attn" in attention["not_chosen"]
    assert len(report["patches"]) >= 2 and report["healthy"] is True


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_another_megatron_is_exit_code_1_and_named(words: list[str]) -> None:
    code, out, _ = doctor(*words, foreign=True)
    assert code == 1
    (line,) = [line for line in out.splitlines() if "unknown source" in line]
    assert "training_log" in line
    if words:
        assert json.loads(out)["healthy"] is False


def fail(rank: int, world: int) -> tuple[int, str, str]:
    import megatron.training.training

    del megatron.training.training.training_log
    return ask(rank, world, ["doctor", "--cpu"], False)


def test_bad_input_is_exit_code_2_and_one_line() -> None:
    ((code, out, errors),) = run_ranks(fail, 1, init_group=False)
    assert code == 2 and out == ""
    assert errors.startswith("bytescale doctor: error: megatron.training.training:training_log is not in")
    assert errors.count("\n") == 1
