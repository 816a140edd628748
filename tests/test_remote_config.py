from __future__ import annotations

import argparse

import pytest

from bytescale_ext.config import HdpConfig, RemoteConfig
from megatron.bytescale.training.arguments import remote_config


def arguments(loader: str, **given: object) -> argparse.Namespace:
    names = ("address", "servers", "server_tokens")
    values = {f"hdp_ray_{name}": given.get(name) for name in names}
    return argparse.Namespace(hdp_loader=loader, hdp_json_key=given.get("json_key"), **values)


def test_what_is_not_given_is_the_default_of_the_configuration() -> None:
    assert remote_config(arguments("ray")) == RemoteConfig()
    made = remote_config(arguments("ray", address="host:6379", servers=5, server_tokens=99, json_key="body"))
    assert made == RemoteConfig("host:6379", 5, 99, "body")


def test_the_local_loader_has_none() -> None:
    assert remote_config(arguments("local")) is None


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("address", "host:1", "--hdp-ray-address"),
        ("servers", 3, "--hdp-ray-servers"),
        ("server_tokens", 7, "--hdp-ray-server-tokens"),
        ("json_key", "body", "--hdp-json-key"),
    ],
)
def test_flags_of_the_other_loader_are_refused_by_name(name: str, value: object, flag: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag} needs --hdp-loader ray$"):
        remote_config(arguments("local", **{name: value}))


@pytest.mark.parametrize("value", [0, -1])
def test_servers_and_their_tokens_are_at_least_one(value: int) -> None:
    with pytest.raises(ValueError, match=f"--hdp-ray-servers must be at least 1, got {value}"):
        remote_config(arguments("ray", servers=value))
    with pytest.raises(ValueError, match=f"--hdp-ray-server-tokens must be at least 1, got {value}"):
        remote_config(arguments("ray", server_tokens=value))


@pytest.mark.parametrize(("stages", "experts", "expected"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_slots_are_aligned_for_pipelines_and_experts(stages: int, experts: int, expected: bool) -> None:
    config = HdpConfig(64, 1, 256, 4, balance="pp", num_stages=stages, expert_ranks=experts)
    assert config.aligned is expected
