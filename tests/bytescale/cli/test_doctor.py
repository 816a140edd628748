from __future__ import annotations

import contextlib
import io
import json

import pytest

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


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
        "get_forward_backward_func                     untouched",
        "training_log                                  untouched",
    ):
        assert words in out


def test_features_with_counts() -> None:
    from megatron.bytescale.features import FEATURES

    _, short, _ = doctor()
    _, whole, _ = doctor("--flags", "--refusals")
    for feature in FEATURES:
        (line,) = [line for line in short.splitlines() if line.startswith(f"{feature.name} ")]
        assert feature.flag in line
        assert line.endswith(feature.summary)
        flags = [action.option_strings[0] for action in feature.actions()]
        assert line.split()[2] == str(len(flags))
        assert all(f"    {flag}\n" in whole for flag in flags)
    assert "    not --tp-comm-overlap: remove it: its buffers have one fixed shape\n" in whole
    assert "refused in every run:\n" in whole
    assert "    not --perform-rl-step: use Megatron's own train_rl.py\n" in whole
    assert "    not --" not in short
    assert len(short.splitlines()) < 60


def test_json_says_the_same() -> None:
    code, out, _ = doctor("--json", "--dtype", "bf16", "--head-dim", "32")
    assert code == 0
    report = json.loads(out)
    assert report["packages"]["megatron-core"] == "0.19.2"
    assert report["device"] == "cpu"
    assert report["backend"] == "gloo"
    attention = report["attention"]
    assert (attention["kernel"], attention["dtype"], attention["head_dim"]) == ("cpu_flash", "bf16", 32)
    assert "flash_attn" in attention["not_chosen"]
    assert len(report["patches"]) >= 2
    by_name = {feature["name"]: feature for feature in report["features"]}
    assert "--seq1f1b-eager" in by_name["slices"]["flags"]
    assert "megatron.training.training:training_log" in by_name["hdp"]["patches"]
    assert by_name["slices"]["refusals"]["--qk-clip"] == "remove it, or train without --seq1f1b-slices"
    assert report["refusals"]["--freeze-all-layers"] == "remove it: nothing would train"
    assert report["healthy"] is True


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
    assert code == 2
    assert out == ""
    assert errors.startswith("bytescale doctor: error: megatron.training.training:training_log is not in")
    assert errors.count("\n") == 1
