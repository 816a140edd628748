from __future__ import annotations

import pytest

from bytescale_ext.config.remote import RemoteConfig


@pytest.mark.parametrize("value", [0, -1])
def test_servers_and_their_tokens_are_at_least_one(value: int) -> None:
    with pytest.raises(ValueError, match=f"--hdp-ray-servers must be at least 1, got {value}"):
        RemoteConfig(num_servers=value)
    with pytest.raises(ValueError, match=f"--hdp-ray-server-tokens must be at least 1, got {value}"):
        RemoteConfig(server_tokens=value)
