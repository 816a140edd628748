"""The training as a module of the installed package."""

from __future__ import annotations

import runpy
import sys

import pytest

import pretrain_gpt_hdp
from megatron.bytescale import train


def test_it_is_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train.main is pretrain_gpt_hdp.main
    calls = []
    monkeypatch.setattr(pretrain_gpt_hdp, "main", lambda: calls.append(1))
    monkeypatch.delitem(sys.modules, "megatron.bytescale.train")
    runpy.run_module("megatron.bytescale.train", run_name="__main__")
    assert calls == [1]
