"""Flags of the remote loader."""

from __future__ import annotations

import pytest

from bytescale_ext.config.remote import RemoteConfig
from tests.bytescale.arguments.resolving import resolved
from tests.e2e.training import HDP, MODEL, TRAIN

COMMON = [*MODEL, *TRAIN, *HDP, "--data-path", "unread"]


@pytest.mark.ranks
def test_remote_loading() -> None:
    line = "--hdp-loader ray --hdp-ray-address host:6379 --hdp-ray-servers 5"
    found = resolved(4, *COMMON, *line.split(), "--hdp-json-key", "body")
    assert found.features["ray"] == RemoteConfig("host:6379", 5, json_key="body")
    assert resolved(4, *COMMON, "--hdp-loader", "ray").features["ray"] == RemoteConfig()
    assert "ray" not in resolved(4, *COMMON, "--hdp-loader", "local").features
