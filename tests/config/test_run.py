"""A run finds the configuration of a feature by its class."""

from __future__ import annotations

import dataclasses

import pytest

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.loss_chunks import LossChunks
from tests.config.runs import hdp_of, run_of


def test_features_are_found_by_class() -> None:
    hdp, chunks = hdp_of(), LossChunks(8)
    run = run_of(hdp, chunks)
    assert run.find(HdpConfig) is hdp
    assert run.get(LossChunks) is chunks
    assert tuple(run.features) == ("HdpConfig", "LossChunks")
    assert run.cluster == hdp.cluster


def test_a_feature_that_is_off_has_no_configuration() -> None:
    run = run_of(LossChunks(8))
    assert run.find(HdpConfig) is None
    with pytest.raises(AssertionError, match=r"HdpConfig is off: \('LossChunks',\)"):
        run.get(HdpConfig)


def test_a_run_is_frozen() -> None:
    run = run_of()
    more = run.with_feature("chunks", LossChunks(3))
    assert run.find(LossChunks) is None
    assert more.get(LossChunks).num_tokens == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.cost = None  # type: ignore[misc]
    with pytest.raises(TypeError):
        more.features["chunks"] = None  # type: ignore[index]


def test_a_chunk_has_a_token() -> None:
    with pytest.raises(ValueError, match="--chunked-cross-entropy 0 must be at least 1 token"):
        LossChunks(0)
