"""``bytescale doctor`` on this machine: text, JSON and exit codes."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def answers(rank: int, world: int, calls: list[list[str]], change: str) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each call of ``bytescale doctor --cpu``.

    ``change``: previous change of Megatron's ``training_log``: "", "replaced" or "deleted".
    """
    import megatron.training.training

    from megatron.bytescale.cli import main

    if change == "replaced":
        megatron.training.training.training_log = answers
    elif change == "deleted":
        del megatron.training.training.training_log
    found = []
    for words in calls:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(["doctor", "--cpu", *words])
        found.append((code, out.getvalue(), errors.getvalue()))
    return found


def ask(*calls: list[str], change: str = "") -> list[tuple[int, str, str]]:
    return run_ranks(answers, 1, list(calls), change, init_group=False)[0]


def test_text_and_json() -> None:
    from megatron.bytescale.features import FEATURES

    json_words = ["--json", "--dtype", "bf16", "--head-dim", "32"]
    (code, short, _), (_, whole, _), (json_code, as_json, _) = ask(
        ["--head-dim", "64"], ["--flags", "--refusals"], json_words
    )
    assert code == json_code == 0
    for words in (
        "megatron-core        0.19.2",
        "backend    gloo (--cpu was given)",
        "attention  cpu_flash for fp32, head width 64 (the first kernel of the table",
        "not torch_flash: runs on cuda, not on cpu",
        "  on sm80   torch_efficient\n",
        "training_log                                  untouched",
    ):
        assert words in short
    for feature in FEATURES:
        (line,) = [line for line in short.splitlines() if line.startswith(f"{feature.name} ")]
        assert feature.flag in line
        assert line.endswith(feature.summary)
        flags = [action.option_strings[0] for action in feature.actions()]
        assert line.split()[2] == str(len(flags))
        assert all(f"    {flag}\n" in whole for flag in flags)
    assert "    not --tp-comm-overlap: remove it: its buffers have one fixed shape\n" in whole
    assert "refused in each run:\n    not " in whole
    assert "    not --" not in short
    report = json.loads(as_json)
    attention = report["attention"]
    assert (attention["kernel"], attention["dtype"], attention["head_dim"]) == ("cpu_flash", "bf16", 32)
    assert "flash_attn" in attention["not_chosen"]
    assert attention["on_gpus"] == {
        "sm80": ["torch_flash", "flash_attn_3"],
        "sm90": ["torch_flash", "flash_attn_3"],
        "sm100": ["torch_cudnn", "flash_attn_4"],
        "sm120": ["torch_flash", "flash_attn"],
    }
    by_name = {feature["name"]: feature for feature in report["features"]}
    assert "megatron.training.training:training_log" in by_name["hdp"]["patches"]
    assert by_name["slices"]["refusals"]["--moe-paged-stash"] == "remove it, or train without --seq1f1b-slices"
    assert report["healthy"] is True


def test_another_megatron_is_exit_code_1_and_named() -> None:
    for (code, out, _), is_json in zip(ask([], ["--json"], change="replaced"), (False, True), strict=True):
        assert code == 1
        (line,) = [line for line in out.splitlines() if "unknown source" in line]
        assert "training_log" in line
        assert not is_json or json.loads(out)["healthy"] is False


def test_a_megatron_without_the_function_is_exit_code_2_and_one_line() -> None:
    ((code, out, errors),) = ask([], change="deleted")
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("bytescale doctor: error: megatron.training.training:training_log is not in")
