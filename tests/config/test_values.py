"""Configurations of features: refused values, and search of a run's configurations by class."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.drafts import KINDS, LAYERS, DraftConfig
from bytescale_ext.config.experts import TraceTo
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.logits import LogitConfig
from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.multi_token import MultiTokenConfig
from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.config.slices import SliceConfig
from bytescale_ext.plan.experts.trace import TraceHead
from bytescale_ext.plan.step.sizes import Slicing
from tests.config.runs import hdp_of, run_of

NAN = float("nan")
REFUSED: list[tuple[type, tuple[Any, ...], str]] = [
    (DraftConfig, ("eagle", 5, 2, 0.7), "--draft-heads eagle: choose one of clover, medusa"),
    (DraftConfig, ("clover", 0, 2, 0.7), "--num-draft-heads 0 must be at least 1"),
    (DraftConfig, ("clover", 5, -1, 0.7), "--draft-layers -1 must be at least 0"),
    (DraftConfig, ("medusa", 5, 0, 0.0), "--draft-decay 0 must be above 0"),
    (DraftConfig, ("medusa", 5, 0, 1.5), "--draft-decay 1.5 must be above 0 and at most 1"),
    (DraftConfig, ("clover", 5, 2, 0.7, NAN), "--draft-hidden-weight nan must be 0 or more"),
    (MultiTokenConfig, (-1, 0.1), "--mtp-num-layers -1 must be at least 1"),
    (MultiTokenConfig, (2, -0.1), "--mtp-loss-scaling-factor -0.2 must be 0 or more"),
    (RemoteConfig, (None, 0), "--hdp-ray-servers must be at least 1, got 0"),
    (LossChunks, (0,), "--chunked-cross-entropy 0 must be at least 1 token"),
]


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_values(kind: type, values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*values)


def test_each_kind_of_heads_has_its_layers() -> None:
    assert set(LAYERS) == set(KINDS)


def test_features_are_found_by_class_in_a_frozen_run() -> None:
    hdp, trace = hdp_of(), TraceTo(Path("loads.jsonl"), TraceHead(experts=8, topk=2, ranks=4))
    run = run_of(hdp, trace)
    assert run.find(HdpConfig) is hdp
    assert run.get(TraceTo) is trace
    assert run.cluster == hdp.cluster
    assert run.find(AnswerLossConfig) is None
    with pytest.raises(AssertionError, match=r"AnswerLossConfig is off: \('HdpConfig', 'TraceTo'\)"):
        run.get(AnswerLossConfig)
    assert run.with_feature("qk_clip", LogitConfig(clips=True)).get(LogitConfig).clips
    more = run.with_feature("sft", AnswerLossConfig(("a", "b")))
    assert run.find(AnswerLossConfig) is None
    assert more.get(AnswerLossConfig).prefixes == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.cost = None  # type: ignore[misc]
    with pytest.raises(TypeError):
        more.features["sft"] = None  # type: ignore[index]


def test_each_step_has_a_checked_schedule_of_slices() -> None:
    schedule = SliceConfig(Slicing(2), (5, 3), num_stages=2).schedule(3)
    assert (schedule.num_micro_batches, schedule.num_slices, schedule.num_chunks) == (3, 2, 1)
    virtual = SliceConfig(Slicing(2), (5, 3), num_stages=4, num_chunks=2)
    assert virtual.group_size == 4
    with pytest.raises(ValueError, match="the nearest numbers of micro-batches are 2"):
        virtual.schedule(1)
