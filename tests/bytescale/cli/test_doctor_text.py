"""The text of ``bytescale doctor`` from a report, without asking the machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

import pytest

from megatron.bytescale.cli import doctor

ATTENTION = doctor.AttentionReport("torch_flash", "the best that fits", "bf16", 128, {"flash_attn": "not installed"})
SLICES = doctor.FeatureReport(
    "slices", "--seq1f1b-slices", "sequences in slices", ["--seq1f1b-slices", "--seq1f1b-eager"],
    ["megatron.core:run"], {"--sft": "remove it", "--mock-data": "give --data-path"},
)  # fmt: skip
REPORT = doctor.Report(
    python="3.12.1", packages={"torch": "2.11", "apex": None}, device="H100", backend="nccl",
    backend_reason="torch sees a GPU", attention=ATTENTION, features=[SLICES],
    refusals={"--use-sharp": "remove it"}, patches=["run  untouched"], healthy=True,
)  # fmt: skip


def test_the_text() -> None:
    lines = doctor.as_text(REPORT).splitlines()
    assert lines[:8] == [
        "python     3.12.1",
        "torch                2.11",
        "apex                 not installed",
        "",
        "device     H100",
        "backend    nccl (torch sees a GPU)",
        "attention  torch_flash for bf16, head width 128 (the best that fits)",
        "           not flash_attn: not installed",
    ]
    assert lines[10].split() == ["slices", "--seq1f1b-slices", "2", "1", "2", "sequences", "in", "slices"]
    assert lines[11:] == ["", "functions of Megatron that features replace:", "run  untouched"]


@pytest.mark.parametrize("with_flags", [False, True])
@pytest.mark.parametrize("with_refusals", [False, True])
def test_flags_and_refusals_are_listed_where_asked_for(with_flags: bool, with_refusals: bool) -> None:
    lines = doctor.as_text(REPORT, with_flags, with_refusals).splitlines()
    flags = ["    --seq1f1b-slices", "    --seq1f1b-eager"] * with_flags
    refusals = ["    not --sft: remove it", "    not --mock-data: give --data-path"] * with_refusals
    always = ["", "refused in every run:", "    not --use-sharp: remove it"] * with_refusals
    assert lines[11:-3] == [*flags, *refusals, *always]


@pytest.mark.parametrize("healthy", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_tells_whether_megatron_is_known(
    healthy: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = replace(REPORT, healthy=healthy)
    monkeypatch.setattr("megatron.bytescale.cpu.install_if_wanted", lambda words: None)
    monkeypatch.setattr(doctor, "diagnose", lambda args, on_cpu: report)
    args = argparse.Namespace(cpu=False, json=as_json, flags=False, refusals=False, launch=None)
    assert doctor.run(args) == (0 if healthy else 1)
    shown = capsys.readouterr().out
    if as_json:
        assert json.loads(shown) == asdict(report)
    else:
        assert shown == doctor.as_text(report) + "\n"
